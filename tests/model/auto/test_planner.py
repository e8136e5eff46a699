"""``exits="auto"`` without a GPU: what it measures, chooses, remembers and says; see test_planner_gpu.py."""

import re
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch
from auxhead.model import AutoRunner, make_runner
from auxhead.model.auto.planner import measure
from support.planner_fakes import NAMES, PLAIN, FakeGpu, images, small_network
from torch import Tensor

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def auto(x: torch.Tensor | None = None, network: object = None, **options: object) -> AutoRunner:
    torch.manual_seed(0)
    x = images(8) if x is None else x
    return make_runner(network or small_network(), x, exits="auto", **{"batch_sizes": (2,), **options})


def test_all_candidates_share_a_trunk_and_all_but_the_chosen_are_closed(gpu: FakeGpu) -> None:
    gpu.us["polled"] = 60.0
    with auto(trunk="cudnn") as runner:
        assert gpu.made == [(PLAIN, "cudnn"), *((name, "the shared trunk") for name in NAMES if name != PLAIN)]
        plan = runner.plans[2]
        assert gpu.open == 1 and list(plan.times) == list(NAMES) and plan.chosen.name == "polled"
        assert plan.times["polled"].host.median == pytest.approx(60, rel=2e-3)
        assert plan.times["polled"].device.median == pytest.approx(30, rel=2e-3)
        network, x = small_network(), images(5)
        found, wanted = runner(x), network(x)
        assert torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.label, wanted.label)
    assert gpu.open == 0
    with pytest.raises(RuntimeError, match="closed"):
        runner(x)


def test_each_batch_size_has_its_own_plan(gpu: FakeGpu) -> None:
    gpu.us["polled (compact)"] = 50.0
    runner = auto(batch_sizes=(4, 1))
    assert [plan.chosen.name for plan in runner.plans.values()] == [PLAIN, "polled (compact)"]
    assert list(runner.plans) == [1, 4] and runner._runners[4].sizes == (1, 4)
    assert "Batch 1: overlapped (1 fork), measured 100.1 us" in runner.describe()
    assert "\nBatch 4: polled (compact), measured 50.0" in runner.describe().replace("50.1", "50.0")


@pytest.mark.parametrize(
    ("us", "said"),
    [
        (
            {"polled": 60},
            "polled, measured 60.1 us to the answer: 40.0% less than the plain graph, overlapped (1 fork), 100.1. "
            "The others: serial 100.1, overlapped (2 forks) 100.1, gated 100.1 us.",
        ),
        (
            {"serial": 110},
            "overlapped (1 fork), measured 100.1 us to the answer: nothing is faster than this plain graph. "
            "The others: serial 110.1, overlapped (2 forks) 100.1, ",
        ),
        (
            {"gated": 99.7},
            "overlapped (1 fork), measured 100.1 us to the answer: this is the plain graph; gated, 99.8, is no faster "
            "beyond the noise. The others: serial 100.1, overlapped (2 forks) 100.1, polled 100.1 us.",
        ),
        (
            {"serial": 80, "polled": 79.5},
            "serial, measured 80.1 us to the answer: 20.0% less than the plain graph, overlapped (1 fork), 100.1; "
            "polled, 79.6, is no faster beyond the noise, and less simple. The others: overlapped (2 forks) 100.1, ",
        ),
    ],
    ids=str,
)
def test_it_says_why(gpu: FakeGpu, us: dict[str, float], said: str) -> None:
    gpu.us.update(us)
    assert f"Batch 2: {said}" in auto().describe()


def test_what_cannot_be_made_or_answers_otherwise_is_left_out(gpu: FakeGpu) -> None:
    gpu.fails["gated"] = RuntimeError("no conditional nodes here.")
    gpu.wrong = {"polled"}
    gpu.us |= {"polled": 10.0, "overlapped (2 forks)": 70.0}
    runner = auto()
    assert gpu.open == 1 and list(runner.plans[2].times) == [n for n in NAMES if n not in ("polled", "gated")]
    assert runner.describe().startswith("Batch 2: overlapped (2 forks), measured 70.1 us")
    assert "us. polled left out: it answered otherwise than overlapped (1 fork). " in runner.describe()
    assert "gated left out: no conditional nodes here.\n" in runner.describe()


def test_without_the_plain_graph_there_is_none(gpu: FakeGpu) -> None:
    gpu.fails[PLAIN] = RuntimeError("layer 'block1' cannot be captured")
    with pytest.raises(RuntimeError, match="layer 'block1' cannot be captured"):
        auto()
    assert gpu.open == 0 and gpu.measured == 0


def test_an_interrupt_closes_all(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    def interrupted(_runners: object, _batches: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("auxhead.model.auto.planner.measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        auto()
    assert gpu.open == 0 and not list(own_cache.rglob("*.json"))


def test_a_plan_is_remembered(gpu: FakeGpu) -> None:
    gpu.us["overlapped (2 forks)"] = 80.0
    first = auto()
    measured = first.describe()
    first.close()
    gpu.us["polled"], gpu.made = 10.0, []
    second = auto()
    assert gpu.measured == 1 and gpu.made == [("overlapped (2 forks)", "as_is")] and gpu.open == 1
    assert second._runners[2].candidate.forks == ("block0", "block1")
    day = first.plans[2].utc[:10]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", day)
    assert f"Batch 2: overlapped (2 forks), remembered from {day}: measured 80.1 us to the answer: 20.0% less" in (
        second.describe()
    )
    assert second.describe().partition("measured")[2] == measured.partition("measured")[2]
    assert not first.plans[2].remembered and second.plans[2].remembered


def test_fresh_measures_anew_and_remembers_that(gpu: FakeGpu) -> None:
    auto()
    gpu.us["polled"] = 10.0
    assert auto(fresh=True).plans[2].chosen.name == "polled" and gpu.measured == 2
    assert auto().plans[2].chosen.name == "polled" and gpu.measured == 2


def test_a_remembered_runner_that_cannot_be_made_any_more_is_measured_anew(gpu: FakeGpu) -> None:
    gpu.us["polled"] = 10.0
    auto().close()
    gpu.fails["polled"] = torch.OutOfMemoryError("no memory")
    runner = auto()
    assert gpu.measured == 2 and runner.plans[2].chosen.name == PLAIN and not runner.plans[2].remembered
    assert "polled left out: no memory." in runner.describe()


def test_a_network_that_cannot_be_told_from_others_is_never_remembered(
    gpu: FakeGpu, monkeypatch, own_cache: Path
) -> None:
    monkeypatch.setattr("auxhead.model.auto.plan_key.network_fingerprint", lambda _network: None)
    assert not auto().plans[2].remembered and not auto().plans[2].remembered
    assert gpu.measured == 2 and not own_cache.exists()


def test_a_damaged_file_is_measured_anew_and_mended(gpu: FakeGpu, own_cache: Path) -> None:
    auto()
    (path,) = own_cache.rglob("*.json")
    path.write_text(path.read_text()[:-100])
    with pytest.warns(UserWarning, match="holds no plan"):
        assert not auto().plans[2].remembered
    assert gpu.measured == 2 and auto().plans[2].remembered


@pytest.mark.parametrize(
    "other",
    [
        {"batch_sizes": (3,)},
        {"trunk": "cudnn"},
        {"x": images(8).to(memory_format=torch.channels_last)},
        {"network": small_network(threshold=0.7)},
        {"network": small_network(threshold=0.0)},
    ],
    ids=["batch", "trunk", "layout", "rule", "exits"],
)
def test_it_is_measured_anew_where_something_else_is_run(gpu: FakeGpu, other: dict[str, object]) -> None:
    auto()
    auto(**other)
    assert gpu.measured == 2


def test_smaller_batches_to_gather_into_are_part_of_what_is_run(gpu: FakeGpu) -> None:
    auto(batch_sizes=(4,))
    assert not auto(batch_sizes=(2, 4)).plans[4].remembered
    assert auto(batch_sizes=(2, 4)).plans[4].remembered


def test_other_samples_that_leave_elsewhere_are_measured(gpu: FakeGpu) -> None:
    """The network is the same, and so are its rules."""
    network, x = small_network(), images(64)
    exits = network(x).exit_index
    early, late = x[exits == 0][:8], x[exits == 3][:8]
    assert len(early) == len(late) == 8
    assert auto(early, network).plans[2].shares == (1.0, 0.0, 0.0, 0.0)
    assert auto(late, network).plans[2].shares == (0.0, 0.0, 0.0, 1.0) and gpu.measured == 2
    assert auto(early.flip(0), network).plans[2].remembered and gpu.measured == 2


def test_samples_in_another_order_stop_a_batch_elsewhere(gpu: FakeGpu) -> None:
    """Half of the samples leave at the first head, but only whole batches can stop there."""
    network, x = small_network(), images(64)
    exits = network(x).exit_index
    early, late = x[exits == 0][:8], x[exits == 3][:8]
    sorted_ = auto(torch.cat([early, late]), network).plans[2]
    mixed = auto(torch.stack([early, late], 1).flatten(0, 1), network).plans[2]
    assert sorted_.shares == mixed.shares and not mixed.remembered


@pytest.mark.parametrize(
    ("example", "options", "kind", "message"),
    [
        (images(2), {"batch_sizes": (0,)}, ValueError, "batch_sizes: got"),
        (images(0), {}, ValueError, "example_input: wants a tensor"),
    ],
)
def test_bad_arguments(gpu: FakeGpu, example, options, kind, message) -> None:
    with pytest.raises(kind, match=message):
        auto(example, **options)


@pytest.mark.parametrize("exits", ["eager", "overlapped", "polled", "gated"])
def test_only_auto_remembers(exits: str) -> None:
    with pytest.raises(ValueError, match=f"fresh: got True with exits='{exits}', wants False"):
        make_runner(small_network(), images(2), exits=exits, fresh=True)


class Clock:
    """Time that passes only while a runner answers."""

    us = 0.0

    def perf_counter(self) -> float:
        return self.us / 1e6

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.us = self.clock.us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return (end.us - self.us) / 1e3


@pytest.mark.parametrize(("batches", "passes"), [(16, 8), (3, 14), (1, 40)])
def test_a_pass_takes_all_batches_and_its_time_is_their_mean(monkeypatch, batches: int, passes: int) -> None:
    """The median of a runner that answers most batches early would tell nothing of the others."""
    clock = Clock()
    monkeypatch.setattr("auxhead.model.auto.planner.time", clock)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: clock)
    us = {"early": [10.0 if place else 110.0 for place in range(batches)], "plain": [50.0] * batches}
    calls: list[tuple[str, int]] = []

    def answer(name: str, x: Tensor) -> None:
        calls.append((name, int(x)))
        clock.us += us[name][int(x)]

    times = measure({name: partial(answer, name) for name in us}, [torch.tensor(place) for place in range(batches)])
    for name in us:
        wanted = pytest.approx([sum(us[name]) / batches] * passes)
        assert times[name].host == wanted and times[name].device == wanted
    assert set(calls) == {(name, place) for name in us for place in range(batches)}
    turns = [(name, len(list(of_one))) for name, of_one in groupby(name for name, _ in calls)]
    one = 1 + 2 * batches
    assert turns[:3] == [("early", one), ("plain", 2 * one), ("early", 2 * one)], "who was last is first the next time"
