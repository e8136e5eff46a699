"""``exits="auto"`` without a GPU: what it measures, chooses, keeps in a file and says; see test_auto_runner_gpu.py."""

import re
from pathlib import Path

import pytest
import torch
from auxhead.model import AutoRunner, make_runner
from auxhead.model.auto import planner
from auxhead.model.auto.pass_times import Deadline
from support.device_clock import pretended_energy_counter
from support.planner_fakes import AS_MADE, NAMES, PLAIN, FakeGpu, Runner, images, small_network

pytestmark = pytest.mark.usefixtures("without_interpreter")
#: Requests that check whether a runner answers alike: one of each batch of two samples of eight.
CHECKED = 4


def auto(x: torch.Tensor | None = None, network: object = None, **options: object) -> AutoRunner:
    torch.manual_seed(0)
    x = images(8) if x is None else x
    return make_runner(
        network or small_network(), x, **{"batch_sizes": (2,), "trunk": "as_is", "plan": None, **options}
    )


def test_all_candidates_share_a_trunk_and_all_but_the_chosen_are_closed(gpu: FakeGpu) -> None:
    gpu.us["polled"] = 60.0
    with auto(trunk="cudnn") as runner:
        assert gpu.made == [(f"{name} on cudnn", "cudnn") for name in AS_MADE] and gpu.trunks == {"cudnn": 1}
        plan = runner.plans[2]
        assert gpu.open == 1 and list(plan.times) == [f"{name} on cudnn" for name in NAMES]
        assert plan.chosen.name == "polled on cudnn" and plan.plain == f"{PLAIN} on cudnn" and not plan.trunk_times
        assert plan.times["polled on cudnn"].host[0] == pytest.approx(60, rel=2e-3)
        assert plan.times["polled on cudnn"].device[0] == pytest.approx(30, rel=2e-3)
        network, x = small_network(), images(5)
        found, wanted = runner(x), network(x)
        assert torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.label, wanted.label)
    assert gpu.open == 0
    with pytest.raises(RuntimeError, match="closed"):
        runner(x)


def test_each_batch_size_has_its_own_plan(gpu: FakeGpu) -> None:
    gpu.us["polled (compact)"] = 60.0
    runner = auto(batch_sizes=(4, 1))
    assert [plan.chosen.name for plan in runner.plans.values()] == [PLAIN, "polled (compact)"]
    assert list(runner.plans) == [1, 4] and runner.runners[4].candidate.compact
    assert runner.runners[4].sizes == (1, 4)
    assert runner.describe().splitlines() == [
        "Batch 1: overlapped (1 fork), trunk as_is.",
        "  100.1 us to the answer: nothing is faster than this plain graph.",
        "  Also measured: serial, overlapped (2 forks), polled, gated. Measured now.",
        "Batch 4: polled (compact), trunk as_is.",
        "  60.1 us to the answer: 40.0% less time than the plain graph, overlapped (1 fork), 100.1 us.",
        "  Also measured: serial, overlapped (2 forks), polled, gated. Measured now.",
    ]


def test_what_cannot_be_made_or_answers_otherwise_is_left_out(gpu: FakeGpu) -> None:
    gpu.fails["gated"] = RuntimeError("no conditional nodes here.")
    gpu.wrong = {"polled"}
    gpu.us |= {"polled": 10.0, "overlapped (2 forks)": 70.0}
    runner = auto()
    assert gpu.open == 1 and list(runner.plans[2].times) == [n for n in NAMES if n not in ("polled", "gated")]
    said = runner.plans[2].describe()
    assert said.startswith("overlapped (2 forks), measured 70.1 us")
    assert "us. polled left out: it answered otherwise than overlapped (1 fork). " in said
    assert said.endswith(" gated left out: no conditional nodes here.")
    assert runner.describe().endswith("\n  Also measured: serial. Left out: polled, gated. Measured now.")


def test_without_the_plain_graph_there_is_none(gpu: FakeGpu) -> None:
    gpu.fails[PLAIN] = RuntimeError("layer 'block1' cannot be captured")
    with pytest.raises(RuntimeError, match="layer 'block1' cannot be captured"):
        auto()
    assert gpu.open == 0 and gpu.measured == 0


@pytest.mark.parametrize("size", [1, 2])
def test_an_interrupt_closes_all(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, path: Path, size: int) -> None:
    measure = planner.measure

    def interrupted(runners: dict[str, Runner], batches: list[torch.Tensor], deadline: Deadline) -> object:
        if len(batches[0]) == size:
            raise KeyboardInterrupt
        return measure(runners, batches, deadline)

    monkeypatch.setattr(planner, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        auto(plan=path, batch_sizes=(1, 2))
    assert gpu.open == 0 and not list(path.parent.iterdir())


def test_the_energy_of_a_request_is_told_where_the_driver_counts_it(gpu: FakeGpu, path: Path, monkeypatch) -> None:
    gpu.us = dict.fromkeys(gpu.us, 1e5) | {"polled": 5e4}  # so that half a second has few requests
    with auto() as runner:
        assert not runner.plans[2].joules
    gpu.counter = pretended_energy_counter(monkeypatch)
    gpu.joules = {PLAIN: 20.0, "polled": 12.5}
    runner = auto(plan=path)
    assert runner.plans[2].joules == pytest.approx({PLAIN: 20.0, "polled": 12.5})
    said = ",050.0 us and 12,500 mJ to the answer: 50.0% less time than the plain graph, overlapped (1 fork), "
    assert f"{said}100,100.0 us and 20,000 mJ.\n" in runner.describe()
    assert runner.runners[2].asked == 20 + CHECKED and gpu.open == 1
    with monkeypatch.context() as patch:
        patch.setattr(gpu.counter, "device_get_total_energy_consumption", None)
        assert auto(plan=path).plans[2].joules == runner.plans[2].joules
    gpu.us["polled"] = 1e5
    assert auto().plans[2].joules == pytest.approx({PLAIN: 20.0})


def test_what_is_interrupted_while_energy_is_measured_is_closed(gpu: FakeGpu, monkeypatch) -> None:
    def interrupted(*_arguments: object) -> float:
        raise KeyboardInterrupt

    gpu.counter = pretended_energy_counter(monkeypatch)
    monkeypatch.setattr(planner, "joules_a_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        auto()
    assert gpu.open == 0


def test_a_counter_that_fails_later_counts_nothing(gpu: FakeGpu, monkeypatch) -> None:
    def fails(*_arguments: object) -> float:
        raise OSError("the driver is gone")

    gpu.counter = pretended_energy_counter(monkeypatch)
    monkeypatch.setattr(planner, "joules_a_call", fails)
    runner = auto()
    assert not runner.plans[2].joules and "mJ" not in runner.describe() and gpu.open == 1


def test_what_counts_is_the_time_to_the_answer(gpu: FakeGpu) -> None:
    gpu.on_device = lambda us: 100.0 - us
    gpu.us |= {"polled": 60.0, "gated": 90.0}
    assert auto().plans[2].chosen.name == "polled"


def test_a_plan_is_kept_in_a_file(gpu: FakeGpu, path: Path) -> None:
    gpu.us["overlapped (2 forks)"] = 80.0
    first = auto(plan=path)
    assert first.describe().endswith(f" Measured now; {path} held no plan that fits.")
    first.close()
    gpu.us["polled"], gpu.made = 10.0, []
    second = auto(plan=str(path))
    assert gpu.measured == 1 and gpu.made == [("overlapped (2 forks)", "as_is")] and gpu.open == 1
    assert second.runners[2].candidate.forks == ("block0", "block1")
    day = first.plans[2].utc[:10]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day)
    assert f"overlapped (2 forks), measured on {day} 80.1 us to the answer: 20.0% less" in second.plans[2].describe()
    assert "\n  80.1 us to the answer: 20.0% less time than the plain graph, " in second.describe()
    assert second.describe().endswith(f" From {path}, measured on {day}.")
    assert not first.plans[2].from_file and second.plans[2].from_file


def test_a_plan_whose_forks_there_are_not_is_measured_anew(gpu: FakeGpu, path: Path) -> None:
    """Somebody has edited the file."""
    auto(plan=path)
    path.write_text(re.sub(r'("chosen": {[^}]*"forks": \[\s*"block)1', r"\g<1>9", path.read_text()))
    assert "block9" in path.read_text()
    runner = auto(plan=path)
    assert gpu.measured == 2 and runner.plans[2].chosen.forks == ("block1",)


def test_a_runner_that_cannot_be_made_any_more_is_measured_anew(gpu: FakeGpu, path: Path) -> None:
    gpu.us["polled"] = 10.0
    auto(plan=path).close()
    gpu.fails["polled"] = torch.OutOfMemoryError("no memory")
    runner = auto(plan=path)
    assert gpu.measured == 2 and runner.plans[2].chosen.name == PLAIN and not runner.plans[2].from_file
    assert "polled left out: no memory." in runner.plans[2].describe()
    assert auto(plan=path).plans[2].chosen.name == PLAIN and gpu.measured == 2, "and that is kept"


def test_parameters_are_taken_over_for_all_batch_sizes(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed: list[object] = []
    monkeypatch.setattr(Runner, "refresh", lambda runner: refreshed.append(runner))
    runner = auto(batch_sizes=(1, 2))
    runner.refresh()
    assert refreshed == list(runner.runners.values()) and len(refreshed) == 2


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        ({"batch_sizes": (3,)}, "batch sizes, exit shares."),
        ({"trunk": "cudnn"}, "trunk."),
        ({"network": small_network(threshold=0.7)}, "rules"),
    ],
    ids=["batch", "trunk", "rule"],
)
def test_it_is_measured_anew_where_something_else_is_run(gpu: FakeGpu, path: Path, other, differing: str) -> None:
    auto(plan=path)
    runner = auto(plan=path, **other)
    assert not any(plan.from_file for plan in runner.plans.values())
    assert f" Measured now; not as in {path}: {differing}" in runner.describe()
    assert all(plan.from_file for plan in auto(plan=path, **other).plans.values()), "the file was replaced"


def test_a_close_that_one_runner_refuses_closes_none(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_runner: object) -> None:
        raise RuntimeError("the current stream is being captured")

    network, x = small_network(), images(5)
    runner = auto(network=network, batch_sizes=(1, 2, 4))
    with monkeypatch.context() as patch:
        patch.setattr(type(runner.runners[1]), "check_closable", refuse, raising=False)
        with pytest.raises(RuntimeError, match="being captured"):
            runner.close()
    assert gpu.open == 3
    assert torch.equal(runner(x).exit_index, network(x).exit_index)
    runner.close()
    assert gpu.open == 0


def test_closed_by_a_handler_of_signals_between_two_parts_of_a_batch(gpu: FakeGpu, monkeypatch) -> None:
    runner = auto(batch_sizes=(1, 2))
    (kind,) = {type(each) for each in runner.runners.values()}
    answer = kind.__call__

    def closing(self: object, x: torch.Tensor) -> object:
        if self.closed:
            raise RuntimeError("this runner is closed")
        result = answer(self, x)
        runner.close()
        return result

    monkeypatch.setattr(kind, "__call__", closing)
    with pytest.raises(RuntimeError, match="closed"):
        runner(images(3))
