"""Measuring for a plan: times of the passes, by a clock that moves only while a device works; who answers alike."""

from collections.abc import Callable
from functools import partial
from itertools import groupby

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitResult, FusedAuxHead
from auxhead.model.auto.pass_times import (
    BUDGETS,
    ENERGY_S,
    Deadline,
    batches_of,
    exits_of,
    least_requests,
    measure,
    shares_of,
)
from auxhead.model.auto.planner import _alike
from support.device_clock import pretended_device
from support.index_networks import Shifting
from support.planner_fakes import images, small_network
from torch import Tensor

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.mark.parametrize(("batches", "passes"), [(16, 8), (3, 14), (1, 40)])
def test_a_pass_takes_all_batches_and_its_time_is_their_mean(monkeypatch, batches: int, passes: int) -> None:
    """The median of a runner that answers most batches early would tell nothing of the others."""
    clock = pretended_device(monkeypatch, "auxhead.model.auto.pass_times")
    us = {"early": [10.0 if index else 110.0 for index in range(batches)], "plain": [50.0] * batches}
    calls: list[tuple[str, int]] = []

    def answer(name: str, x: Tensor) -> None:
        calls.append((name, int(x)))
        clock.launch(us[name][int(x)])

    class Answering(partial):
        def wait_until_idle(self) -> None:
            pass

    runners = {name: Answering(answer, name) for name in us}
    times = measure(runners, [torch.tensor(index) for index in range(batches)], Deadline.of("quick"))
    for name in us:
        wanted = pytest.approx([sum(us[name]) / batches] * passes)
        assert times[name].host == wanted and times[name].device == wanted
    assert set(calls) == {(name, index) for name in us for index in range(batches)}
    turns = [(name, len(list(of_one))) for name, of_one in groupby(name for name, _ in calls)]
    one = 1 + 2 * batches
    assert turns[:3] == [("early", one), ("plain", 2 * one), ("early", 2 * one)], "who was last is first the next time"


@pytest.mark.parametrize(
    ("batches", "us", "passes"), [(1, 10.0, 40), (3, 10.0, 14), (16, 10.0, 8), (1, 2e3, 40), (1, 4e3, 40), (1, 2e4, 8)]
)
def test_after_the_deadline_it_goes_on_for_a_second_and_then_as_far_as_a_choice_needs(
    monkeypatch, batches: int, us: float, passes: int
) -> None:
    """As few as chance allows, in which every pass has to be won: 2 % are seldom seen by that."""
    clock = pretended_device(monkeypatch, "auxhead.model.auto.pass_times")
    requests = []

    class Answering:
        def __call__(self, _x: Tensor) -> None:
            requests.append(1)
            clock.launch(us)

        def wait_until_idle(self) -> None:
            pass

    over = Deadline("quick", 0.0, 0.0)
    times = measure({name: Answering() for name in "ab"}, [torch.zeros(1)] * batches, over)
    assert {len(measured) for one in times.values() for measured in one} == {passes}
    assert len(requests) == 2 * (passes + 2) * (2 * batches + 1)
    assert least_requests(batches) == 10 * (2 * batches + 1)


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_measured_after_the_deadline_is_within_the_budget(monkeypatch, budget: str) -> None:
    clock = pretended_device(monkeypatch, "auxhead.model.auto.pass_times")

    class Answering:
        def __call__(self, _x: Tensor) -> None:
            clock.launch(6e3)

        def wait_until_idle(self) -> None:
            pass

    deadline = Deadline.of(budget)
    clock.us = deadline.end * 1e6
    measure({name: Answering() for name in "ab"}, [torch.zeros(1)], deadline)
    with_energy = clock.monotonic() + 2 * ENERGY_S
    assert 0.9 * BUDGETS[budget] < with_energy < BUDGETS[budget] + 0.1, "but for the pass that was under way"


def differing(labels: int = 0, exits: int = 0) -> Callable[[Tensor], ExitResult]:
    """Make a runner that answers otherwise for the samples 0, 1, ... by their label, and for the last by their exit."""

    def answer(x: Tensor) -> ExitResult:
        label, exit_index = torch.zeros_like(x), torch.zeros_like(x)
        label[x < labels], exit_index[x >= 200 - exits] = 1, 1
        return ExitResult(label, torch.zeros(len(x)), None, exit_index)

    return answer


@pytest.mark.parametrize(
    ("samples", "labels", "exits", "alike"),
    [
        (200, 0, 0, True), (200, 2, 0, True), (200, 0, 2, True), (200, 1, 1, True),
        (200, 3, 0, False), (200, 0, 3, False), (200, 2, 1, False),
        (199, 1, 0, True), (199, 2, 0, False), (100, 1, 0, True), (99, 1, 0, False),
        (10, 1, 0, False), (10, 0, 0, True),
    ],
)  # fmt: skip
def test_one_answer_in_a_hundred_may_differ_by_rounding(samples: int, labels: int, exits: int, alike: bool) -> None:
    batches = torch.arange(samples).split(50)
    assert _alike(differing(labels, exits), differing(), batches) == alike
    assert _alike(differing(), differing(labels, exits), batches) == alike


# Batches of the example, and where their samples leave


def test_an_example_is_cut_into_batches_and_a_short_one_is_filled() -> None:
    x = images(7)
    assert torch.equal(torch.cat(batches_of(x, 3)), x[:6])
    (filled,) = batches_of(x[:2], 5)
    assert torch.equal(filled, torch.cat([x[:2], x[:2], x[:1]]))
    assert len(batches_of(x[:1].expand(100, -1, -1, -1), 2)) == 16


def test_a_backbone_that_changes_its_input_leaves_the_example_as_it_is() -> None:
    x = torch.randint(0, 8, (8, 12))
    before = x.clone()
    heads = {tap: FusedAuxHead(None, 5) for tap in Shifting.taps}
    exits_of(EarlyExitNetwork(Shifting(), heads, example_input=x).eval(), batches_of(x, 4))
    assert torch.equal(x, before)


def test_where_samples_leave() -> None:
    network, x = small_network(), images(12)
    exits = exits_of(network, x.split(4))
    assert torch.equal(exits.flatten(), network(x).exit_index) and exits.shape == (3, 4)
    assert shares_of(torch.tensor([[0, 3], [1, 3], [3, 3], [2, 0]]), 3) == (0.25, 0.125, 0.125, 0.5)
    assert shares_of(torch.zeros(2, 2).long(), 3) == (1, 0, 0, 0)
