"""exit_monitor.py: every answer is counted once, whoever gives it, and drift is told from chance."""

import copy
import pickle
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from auxhead.kernels.reference.criteria import TALLY_BINS
from auxhead.model import AutoRunner, DriftWarning, EarlyExitNetwork, ExitMonitor, ExitResult, make_runner
from auxhead.model.auto.pass_times import BUDGETS
from support.exits_plan_cases import as_on_a_gpu, images, make_network, unplanned
from support.graph_runner_cases import WAYS
from support.planner_fakes import FakeGpu, small_network
from support.planner_fakes import images as planned_images
from support.simulated_cuda import simulated_cuda
from torch import nn

SHARES = (0.25, 0.25, 0.25, 0.25)


def monitored(device: str = "cpu") -> EarlyExitNetwork:
    """Two of the first eight images leave at each of its exits."""
    net = make_network(device)
    net.monitor = ExitMonitor(SHARES, 1000)
    return net


@pytest.fixture
def net() -> EarlyExitNetwork:
    return monitored()


def histogram_of(*answers: ExitResult) -> torch.Tensor:
    """One by one."""
    counted = torch.zeros(4, TALLY_BINS, dtype=torch.int64)
    for answer in answers:
        for index, confidence in zip(answer.exit_index.tolist(), answer.confidence.tolist(), strict=True):
            counted[index, min(TALLY_BINS - 1, int(confidence * TALLY_BINS))] += 1
    return counted


def counted_again(net: EarlyExitNetwork) -> torch.Tensor:
    found = net.monitor.histogram()
    net.monitor.reset()
    assert net.monitor.counts().tolist() == [0, 0, 0, 0]
    return found


@pytest.mark.parametrize("stop", [False, True], ids=["all run", "stop"])
@pytest.mark.parametrize("planned", [False, True])
def test_eager_answers_are_counted(net: EarlyExitNetwork, planned: bool, stop: bool) -> None:
    batches = [images(8), images(8)[2:5], images(1)]
    wanted = histogram_of(*(unplanned(net, x) for x in batches))
    assert wanted.sum(1).min() >= 2
    for _ in range(2):
        with as_on_a_gpu() if planned else nullcontext():
            for x in batches:
                net(x, stop=stop)
        assert torch.equal(counted_again(net), wanted)


def test_another_monitor_counts_from_the_next_call_on(net: EarlyExitNetwork) -> None:
    with as_on_a_gpu():
        net(images(8))
        first, net.monitor = net.monitor, ExitMonitor(SHARES, 1000)
        net(images(3))
        second, net.monitor = net.monitor, None
        net(images(8))
    assert first is not None and int(first.counts().sum()) == 8
    assert second is not None and int(second.counts().sum()) == 3


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_runners_count_their_answers_and_nothing_else(net: EarlyExitNetwork, way: dict) -> None:
    batches = [images(8), images(8)[:3], images(8)[1:6], images(8)]
    wanted = histogram_of(*(unplanned(net, x) for x in batches))
    with simulated_cuda():
        runner = make_runner(net, images(8), batch_sizes=(2, 4), **way)
        assert int(net.monitor.counts().sum()) == 0, "what making it takes"
        for x in batches:
            runner(x)
        assert torch.equal(counted_again(net), wanted)


def test_measuring_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch)
    monkeypatch.setitem(BUDGETS, "quick", 1.5)
    net = small_network()
    net.monitor = ExitMonitor(SHARES[: len(net.taps)] + (1 - sum(SHARES[: len(net.taps)]),), 100)
    net(planned_images(3))
    runner = make_runner(net, planned_images(4), batch_sizes="on_demand")
    assert isinstance(runner, AutoRunner) and int(net.monitor.counts().sum()) == 3
    runner(planned_images(2))
    assert int(net.monitor.counts().sum()) == 5


def test_copies_count_for_themselves(net: EarlyExitNetwork) -> None:
    net(images(8))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert other.monitor.shares == SHARES and other.monitor.samples == 1000
        other(images(3))
        assert int(other.monitor.counts().sum()) == 3
    assert int(net.monitor.counts().sum()) == 8


# Drift


def drawn(shares: tuple[float, ...], samples: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(torch.tensor(shares), samples, replacement=True, generator=generator)


def counting(exit_index: torch.Tensor, **options: float) -> ExitMonitor:
    monitor = ExitMonitor((0.5, 0.3, 0.2), 2000, **options)
    monitor.count(exit_index, torch.full(exit_index.shape, 0.9))
    return monitor


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("no_warnings")
def test_chance_is_not_taken_for_drift() -> None:
    for seed in range(100):
        for samples in (1, 50, 5000):
            assert not counting(drawn((0.5, 0.3, 0.2), samples, seed), confidence=0.99).check()
    assert not ExitMonitor((0.5, 0.5), 10).check(), "nothing was counted"


def test_drift_is_named() -> None:
    monitor = counting(drawn((0.1, 0.3, 0.6), 3000, seed=0))
    with pytest.warns(DriftWarning, match=r"of 3,000 samples exit 0 answers 9.5%, not 41.2% to 58.8%, exit 2"):
        first, second = monitor.check()
    assert (first.exit_index, second.exit_index) == (0, 2)
    assert first.share < first.low < 0.5 < first.high and second.low < 0.2 < second.high < second.share


def test_bad_arguments_are_named(net: EarlyExitNetwork) -> None:
    for arguments, message in (
        (((0.5, 0.4), 10), r"shares: got \[0.5, 0.4\], wants one of each exit, 0 or more, that add up to 1"),
        (((1.5, -0.5), 10), r"shares: got \[1.5, -0.5\]"),
        (((1.0,), 10), r"shares: got \[1.0\]"),
        ((0.5, 10), "shares: got float, wants a number for each exit"),
        (((0.5, 0.5), 0), "samples: got 0, wants a positive int"),
        (((0.5, 0.5), 2.5), "samples: got 2.5"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            ExitMonitor(*arguments)
    net(images(8))
    for shares, samples, message in (
        ((0.5, 0.5), 10, "shares: got 2, wants 4, as many exits as before"),
        ((0.5, 0.4, 0.0, 0.0), 10, r"shares: got \[0.5, 0.4, 0.0, 0.0\], wants one of each exit"),
        ((0.25,) * 4, 0, "samples: got 0, wants a positive int"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            net.monitor.expect(shares, samples)
        assert (net.monitor.shares, net.monitor.samples) == (SHARES, 1000) and int(net.monitor.counts().sum()) == 8


def test_what_is_no_monitor_of_the_network_is_refused_where_it_is_given(net: EarlyExitNetwork) -> None:
    before = net.monitor
    for shares in ((0.5, 0.5), (0.2,) * 5):
        with pytest.raises(ValueError, match=f"network.monitor: has shares of {len(shares)} exits, wants 4"):
            net.monitor = ExitMonitor(shares, 10)
    with pytest.raises(TypeError, match="network.monitor: got str, wants an ExitMonitor or None"):
        net.monitor = "on"  # type: ignore[assignment]
    assert net.monitor is before


def test_other_shares_are_expected_from_then_on(net: EarlyExitNetwork) -> None:
    with simulated_cuda():
        runner = make_runner(net, images(8), exits="overlapped", batch_sizes=(8,))
        runner(images(8))
        net.monitor.expect([0.1, 0.2, 0.3, 0.4], 50)
        assert net.monitor.shares == (0.1, 0.2, 0.3, 0.4) and net.monitor.samples == 50
        assert int(net.monitor.counts().sum()) == 0
        runner(images(8))
        assert int(net.monitor.counts().sum()) == 8, "what was captured goes on counting there"


@pytest.mark.parametrize("layer", ["second", "third", "fc"])
def test_what_launches_have_counted_is_not_counted_again(net: EarlyExitNetwork, layer: str) -> None:
    """A pass goes on head by head where an output is no plain tensor, of which earlier exits have answered already."""
    x = images(8)
    wanted = histogram_of(unplanned(net, x))
    net.backbone.get_submodule(layer).register_forward_hook(lambda _layer, _inputs, y: nn.Parameter(y))
    for stop in (False, True):
        with as_on_a_gpu():
            net(x, stop=stop)
        assert torch.equal(counted_again(net), wanted), stop


def test_threads_that_use_it_first_at_once_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, began, zeros = ExitMonitor((0.5, 0.5), 10), threading.Barrier(4), torch.zeros

    def slow(*shape: int, **options: object) -> torch.Tensor:
        time.sleep(0.02)
        return zeros(*shape, **options)

    def count() -> None:
        exits, confidence = torch.zeros(8, dtype=torch.int64), torch.full((8,), 0.5)
        began.wait()
        monitor.count(exits, confidence)

    with monkeypatch.context() as patch:
        patch.setattr("auxhead.model.answers.exit_monitor.torch.zeros", slow)
        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert monitor.counts().tolist() == [32, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("stops_at_every_tap")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_launches_count_what_they_merge_once(way: dict) -> None:
    net, batches = monitored("cuda"), [images(8).cuda(), images(8)[:3].cuda(), images(8)[1:6].cuda()]
    with make_runner(net, images(8).cuda(), batch_sizes=(2, 4), **way) as runner:
        assert int(net.monitor.counts().sum()) == 0, "what making it takes"
        answers = [runner(x).cpu() for x in batches for _ in range(3)]
        torch.cuda.synchronize()
        assert torch.equal(counted_again(net), histogram_of(*answers))
    for stop in (False, True):
        answers = [net(x, stop=stop).cpu() for x in batches for _ in range(3)]
        assert torch.equal(counted_again(net), histogram_of(*answers))
