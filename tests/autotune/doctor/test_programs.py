"""The doctor's programs: findings in traces of them that a GPU recorded and, where there is one, live."""

from pathlib import Path

import pytest
import torch
from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.findings.kinds import KINDS
from auxhead.autotune.doctor.load_trace import load_trace
from auxhead.model import EarlyExitNetwork
from auxhead.model.guides.steps import (
    TAPS,
    Graphs,
    Independent,
    InLine,
    Priorities,
    ReturningEarly,
    StreamsLeftOut,
    StreamsRight,
    one_launch_a_head,
    real_exits,
    shorter_trunk,
)
from auxhead.model.guides.targets import parts
from support.doctor_programs.all_programs import CORRECT, FAULTY, ON_CPU, PROGRAMS
from support.doctor_programs.planted import PROGRAMS as PLANTED
from support.doctor_programs.program import BESIDE, Program
from support.doctor_programs.recurring import PAIRS
from support.example_models import needs_gpu
from support.record_doctor_traces import profile_program

TRACES = Path(__file__).parent / "traces"
#: In the repository, all together.
MOST_BYTES = 2_000_000
#: On a GPU other tests are for them.
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")


def test_every_kind_of_finding_is_planted_by_itself() -> None:
    planted = [*PLANTED.values(), *(faulty for faulty, _ in PAIRS.values())]
    assert sorted(kind for program in planted for kind in program.finds) == sorted(KINDS)
    for name, program in PROGRAMS.items():
        assert program.finds | program.may_find <= set(KINDS), name
        assert program.finds or not program.may_find, f"{name} is correct, and may have no finding"
    assert len(CORRECT) >= 10 and not set(FAULTY) & set(CORRECT)


def found_in(file: Path, program: Program) -> set[str]:
    """Kinds of findings in a trace of a program, but for those beside what it is about."""
    return {finding.kind for finding in find_all(load_trace(file))} - (BESIDE - program.finds - program.may_find)


def test_planted_faults_are_found_and_nothing_in_correct_programs() -> None:
    for name, program in PROGRAMS.items():
        file = TRACES / f"{name}.json.gz"
        assert file.exists(), f"no trace of {name}: record it with support.record_doctor_traces"
        assert program.finds <= found_in(file, program) <= program.finds | program.may_find, name


def test_there_are_traces_of_the_programs_alone_and_they_are_small() -> None:
    files = sorted(TRACES.glob("*"))
    assert {file.name.removesuffix(".json.gz") for file in files} == {*PROGRAMS}
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


@without_gpu
@pytest.mark.usefixtures("without_interpreter")
@torch.no_grad()
def test_programs_can_be_called_again_and_again() -> None:
    for name in ON_CPU:
        call, x = PROGRAMS[name].make()
        for _ in range(2):
            call(x)


@without_gpu
@torch.no_grad()
def test_all_forms_of_the_question_answer_as_in_line() -> None:
    backbone, heads, x = parts()
    wanted = InLine(backbone, heads).eval()(x)
    assert len(wanted) == len(TAPS) + 1
    for each in wanted:
        torch.testing.assert_close(each.sum(dim=1), torch.ones(len(x)))
    torch.testing.assert_close(wanted[-1], backbone(x).softmax(dim=1))

    torch.testing.assert_close(Independent(backbone, heads).eval()(x), wanted)
    early = ReturningEarly(backbone, heads).eval()
    early.threshold = 1.0  # nobody is so sure
    torch.testing.assert_close(early(x), wanted)
    early.threshold = 0.0
    torch.testing.assert_close(early(x), wanted[:1])


@without_gpu
@pytest.mark.parametrize("leaves_at", [1, len(TAPS)])
@pytest.mark.usefixtures("without_interpreter")
@torch.no_grad()
def test_the_network_of_the_last_steps_answers_as_in_line(leaves_at: int) -> None:
    backbone, heads, x = parts()
    wanted = InLine(backbone, heads).eval()(x)[leaves_at]
    rules = {tap: float(index != leaves_at) for index, tap in enumerate(TAPS)}
    answer = EarlyExitNetwork(backbone, heads, rules, example_input=x)(x)
    assert answer.exit_index.tolist() == [leaves_at] * len(x)
    torch.testing.assert_close(answer.probs, wanted)
    assert torch.equal(answer.label, wanted.argmax(dim=1))


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_planted_faults_are_found_live_and_nothing_in_correct_programs(self, name: str, tmp_path: Path) -> None:
        program = PROGRAMS[name]
        if torch.cuda.device_count() < program.devices:
            pytest.skip(f"takes {program.devices} GPUs")
        if "timm" in name:
            pytest.importorskip("timm")
        profile_program(program, tmp_path / "trace.json")
        found = found_in(tmp_path / "trace.json", program)
        assert program.finds <= found <= program.finds | program.may_find

    @torch.no_grad()
    def test_all_steps_of_the_guide_answer_as_in_line(self) -> None:
        backbone, heads, x = parts()
        other = torch.randn_like(x)
        steps = {
            "left out": StreamsLeftOut(backbone, heads),
            "right": StreamsRight(backbone, heads),
            "priorities": Priorities(backbone, heads),
            "graphs": Graphs(StreamsRight(backbone, heads), x),
        }
        for batch in (x, other, x):
            wanted = InLine(backbone, heads)(batch)
            for name, step in steps.items():
                torch.testing.assert_close(
                    step(batch), wanted, rtol=0.0, atol=5e-3, msg=lambda told, name=name: name + told
                )

        wanted = InLine(backbone, heads)(x)
        leave_at_second = {tap: float(index != 1) for index, tap in enumerate(TAPS)}
        for runner, exit_index in (
            (one_launch_a_head(backbone, heads, x), len(TAPS)),
            (shorter_trunk(backbone, heads, x), len(TAPS)),
            (real_exits(backbone, heads, x, leave_at_second), 1),
        ):
            with runner:
                answer = runner(x)
                assert answer.exit_index.tolist() == [exit_index] * len(x)
                torch.testing.assert_close(answer.probs.float(), wanted[exit_index].float(), rtol=0.0, atol=5e-3)
