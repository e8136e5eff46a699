"""The doctor live: each planted fault is found, nothing is found in correct programs, and the guide's steps agree."""

from pathlib import Path

import pytest
import torch
from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.load_trace import load_trace
from auxhead.model.guides.steps import (
    TAPS,
    Graphs,
    InLine,
    Priorities,
    StreamsLeftOut,
    StreamsRight,
    one_launch_a_head,
    real_exits,
    shorter_trunk,
)
from auxhead.model.guides.targets import parts
from support.doctor_programs.all_programs import CORRECT, FAULTY, PROGRAMS
from support.example_models import needs_gpu
from support.record_doctor_traces import profile_program

pytestmark = needs_gpu


def found_in(name: str, folder: Path) -> list[str]:
    """Kinds of what the doctor finds in a program."""
    program = PROGRAMS[name]
    if torch.cuda.device_count() < program.devices:
        pytest.skip(f"takes {program.devices} GPUs")
    if "timm" in name:
        pytest.importorskip("timm")
    file = folder / "trace.json"
    profile_program(program, file)
    return [finding.kind for finding in find_all(load_trace(file))]


@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    program, found = PROGRAMS[name], set(found_in(name, tmp_path))
    assert program.finds <= found <= program.finds | program.may_find


@pytest.mark.parametrize("name", CORRECT)
def test_nothing_is_found_in_a_correct_program(name: str, tmp_path: Path) -> None:
    assert found_in(name, tmp_path) == []


@torch.no_grad()
def test_all_steps_of_the_guide_answer_as_in_line() -> None:
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
