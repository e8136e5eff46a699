"""``batch_sizes="on_demand"`` without a GPU: sizes that are planned at their first request."""

import re
from pathlib import Path

import pytest
import torch
from auxhead.model import make_runner
from auxhead.model.auto import planner
from auxhead.model.auto.auto_runner import _MOST_SIZES
from support.planner_fakes import PLAIN, FakeGpu, first_call, images, small_network

pytestmark = pytest.mark.usefixtures("without_interpreter")


def test_a_size_that_is_new_is_planned_at_its_first_request(gpu: FakeGpu) -> None:
    gpu.us["gated"] = 60.0
    runner, network = first_call(batch_sizes="on_demand"), small_network()
    assert list(runner.plans) == [4] and gpu.measured == 1
    for x in (images(2), images(2), images(7), images(7), images(4)):
        found, wanted = runner(x), network(x)
        assert torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
    assert gpu.measured == 3 and gpu.open == 3 and list(runner.runners) == [4, 2, 7]
    before = runner.runners[2].asked
    runner(images(2))
    assert runner.runners[2].asked == before + 1
    assert re.findall(r"^Batch (\d):", runner.describe(), re.MULTILINE) == ["2", "4", "7"]
    assert gpu.trunks["as_is"] == 1, "that of the first size is shared"
    runner.close()
    assert gpu.open == 0


def test_no_more_sizes_than_a_bound(gpu: FakeGpu) -> None:
    runner, network = first_call(1, batch_sizes="on_demand"), small_network()
    for size in range(2, _MOST_SIZES + 4):
        x = images(size)
        assert torch.equal(runner(x).label, network(x).label)
    assert list(runner.plans) == list(range(1, _MOST_SIZES + 1)) and gpu.open == _MOST_SIZES


@pytest.mark.parametrize("samples", [2, 9])
def test_where_a_size_cannot_be_added_others_answer(gpu: FakeGpu, samples: int) -> None:
    runner, x, network = first_call(batch_sizes="on_demand"), images(samples), small_network()
    gpu.fails[PLAIN] = torch.OutOfMemoryError("no\nmemory")
    made = len(gpu.made)
    for _ in range(2):
        assert torch.equal(runner(x).label, network(x).label)
    assert list(runner.plans) == [4] and gpu.open == 1
    assert runner.describe().endswith(f"\nBatch {samples} was not added: no memory")
    gpu.fails.clear()
    runner(x)
    assert len(gpu.made) == made, "and it is not tried again"


def test_an_interrupt_while_a_size_is_added_leaves_the_runner_as_it_was(gpu: FakeGpu) -> None:
    runner = first_call(batch_sizes="on_demand")
    gpu.fails["gated"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        runner(images(2))
    assert gpu.open == 1 and list(runner.plans) == [4]
    gpu.fails.clear()
    runner(images(2))
    assert list(runner.plans) == [4, 2]


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8, 8).half(), None, torch.tensor(1.0)])
def test_a_bad_request_adds_nothing(gpu: FakeGpu, x: object) -> None:
    runner = first_call(batch_sizes="on_demand")
    with pytest.raises((TypeError, ValueError), match=r"^x: got"):
        runner(x)
    assert gpu.measured == 1


def test_a_network_put_into_training_mode_is_not_run_to_add_a_size(gpu: FakeGpu) -> None:
    """It would change what its batch norms have learned."""
    runner = first_call(batch_sizes="on_demand")
    before = [buffer.clone() for buffer in runner.network.buffers()]
    runner.network.train()
    for each in runner.runners.values():
        each.network = small_network()
    runner(images(2))
    assert "Batch 2 was not added: network: in training mode" in runner.describe()
    assert all(torch.equal(one, other) for one, other in zip(before, runner.network.buffers(), strict=True))


def test_what_the_example_is_later_is_all_the_same(gpu: FakeGpu) -> None:
    x = images(4)
    runner = make_runner(small_network(), x, batch_sizes="on_demand")
    before = runner.plans[4].shares
    x.fill_(float("nan"))
    runner(images(2))
    assert runner.plans[2].shares == before


@pytest.mark.parametrize("call", ["close", "refresh", "__call__"])
def test_nothing_is_done_from_within_while_a_size_is_added(gpu: FakeGpu, monkeypatch, call: str) -> None:
    """By a handler of signals, say."""
    runner = first_call(batch_sizes="on_demand")
    refused = []

    def interrupted(*arguments: object) -> object:
        with pytest.raises(RuntimeError, match="^this runner is in"):
            getattr(runner, call)(*[images(3)] * (call == "__call__"))
        refused.append(call)
        return measure(*arguments)

    measure = planner.measure
    monkeypatch.setattr(planner, "measure", interrupted)
    runner(images(2))
    assert refused and list(runner.plans) == [4, 2]
    runner.close()


def test_sizes_on_demand_are_kept_in_the_file_one_after_another(gpu: FakeGpu, path: Path) -> None:
    for _ in range(2):
        with first_call(plan=path, batch_sizes="on_demand") as runner:
            runner(images(2))
            runner(images(6))
            assert list(runner.plans) == [4, 2, 6]
            said = runner.describe()
        assert gpu.measured == 3
    assert all(plan.from_file for plan in runner.plans.values()) and said.count(f"From {path}") == 3
    assert not first_call(plan=path).plans[4].from_file, "these are other batch sizes"


def test_a_size_is_planned_by_the_rules_in_force_at_its_first_request(gpu: FakeGpu, path: Path) -> None:
    with first_call(plan=path, batch_sizes="on_demand") as runner:
        runner(images(2))
    with first_call(plan=path, batch_sizes="on_demand") as runner:
        assert runner.plans[4].from_file
        runner.network.set_rules(0.0)
        runner(images(2))
        assert runner.plans[2].shares == (1.0, 0.0, 0.0, 0.0) and not runner.plans[2].from_file
