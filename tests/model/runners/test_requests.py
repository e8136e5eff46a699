"""Requests in any mode, from any thread and after any change, simulated on the CPU; see test_requests_gpu.py."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Event

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead, OverlappedRunner, make_runner, make_trunk
from auxhead.model.runners.captures import Captures
from support.example_models import SmallNet, plain_heads
from torch import Tensor, nn
from torch.nn import functional


@pytest.fixture
def network() -> EarlyExitNetwork:
    backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    return EarlyExitNetwork(backbone, {"1": FusedAuxHead(8, 5)}, 0.5, example_input=X).eval()


X = torch.randn(1, 4)


@pytest.mark.parametrize("mode", [nullcontext, torch.enable_grad, torch.inference_mode])
def test_no_gradient_is_recorded_whatever_the_mode(
    network: EarlyExitNetwork, idle: None, mode: Callable[[], object]
) -> None:
    """It would keep all activations; and what is made in inference mode cannot be written outside of it."""
    modes: set[tuple[bool, bool]] = set()

    def note(_layer: nn.Module, _inputs: object, _output: object) -> None:
        modes.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    network.backbone[0].register_forward_hook(note)
    with mode():
        runner = make_runner(network, X, exits="overlapped", batch_sizes=(1,))
    assert modes == {(False, False)}
    x = X.clone().requires_grad_()
    answer, batch = runner(x), weakref.ref(x)
    assert not answer.confidence.requires_grad and not answer.probs.requires_grad
    del x
    assert batch() is None, "nothing of a batch is kept for a gradient"
    runner(X)


def test_nothing_is_done_within_a_capture_of_the_caller(
    network: EarlyExitNetwork, idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(network, X, exits="overlapped", batch_sizes=(1,))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        again = partial(make_runner, network, X, exits="overlapped", batch_sizes=(1,))
        for call in (lambda: runner(X), runner.refresh, runner.close, again):
            with pytest.raises(RuntimeError, match="^the current stream is being captured"):
                call()
    runner(X)


def test_a_closed_runner_keeps_no_memory_of_a_network_that_is_cast(network: EarlyExitNetwork, idle: None) -> None:
    runner = make_runner(network, X, trunk="cudnn", exits="overlapped", batch_sizes=(1,))
    trunk = weakref.ref(runner.trunk.module)
    runner.close()
    before = [weakref.ref(tensor.untyped_storage()) for tensor in network.backbone.state_dict().values()]
    network.to(torch.float64)
    gc.collect()
    assert trunk() is None
    assert [one() is None for one in before].count(False) == 1, "the count of batches alone is not cast"


class Shifting(nn.Module):
    """Counts its input, indices, up in place: done twice to the same, they are out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, 8)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.last(self.embedding(x))


@pytest.mark.usefixtures("simulation", "every_move_pays")
@pytest.mark.parametrize("options", [{"exits": "overlapped"}, {"exits": "polled", "compact": True}])
def test_the_padding_of_a_batch_that_the_backbone_changes_is_filled_anew(options: dict[str, object]) -> None:
    x = torch.zeros(4, dtype=torch.int64)
    network = EarlyExitNetwork(Shifting(), {"embedding": FusedAuxHead(8, 5)}, 1.0, example_input=x).eval()
    runner = make_runner(network, x, batch_sizes=(2, 4), **options)
    for samples in (1, 3, 1):
        assert len(runner(x[:samples]).label) == samples
    assert not x.any()


class Negating(nn.Module):
    """What it returns is negated by whoever reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch._neg_view(x)


def test_taps_and_logits_that_are_lazily_negated(simulation: None) -> None:
    backbone = nn.Sequential(nn.Linear(4, 8), Negating(), nn.Linear(8, 5), Negating())
    network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(8, 5)}, 0.0).eval()
    x = torch.randn(2, 4)
    for threshold in (0.0, 1.0):
        network.set_rules(threshold)
        found = make_runner(network, x, batch_sizes=(2,), exits="overlapped")(x)
        torch.testing.assert_close(found.probs, network(x).probs)


def test_heads_have_grids_pools_and_temperatures_of_their_own(simulation: None) -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 5))
    heads = {
        "0": FusedAuxHead(8, 5, pool="max", pool_size=(2, 1), rule=ExitRule(0.0, temperature=2.0)),
        "1": FusedAuxHead(8, 5, pool="avg", pool_size=(1, 2), bias=False, rule=ExitRule(0.0, temperature=0.5)),
    }
    x = torch.randn(1, 3, 2, 2)
    network = EarlyExitNetwork(backbone, heads, example_input=x).eval()
    runner = make_runner(network, x, exits="overlapped", batch_sizes=(1,))
    for disabled in (False, True):
        network.fused_heads[0].rule.enabled = not disabled
        found, wanted = runner(x), network(x)
        assert torch.equal(found.exit_index, wanted.exit_index) and set(found.exit_index.tolist()) == {disabled}
        torch.testing.assert_close(found.probs, wanted.probs)


def test_probabilities_are_there_if_all_heads_have_them(idle: None) -> None:
    heads = {"0": FusedAuxHead(8, 5), "1": FusedAuxHead(8, 5, return_probs=False)}
    network = EarlyExitNetwork(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5)), heads, 0.5).eval()
    assert make_runner(network, X, exits="overlapped", batch_sizes=(1,))(X).probs is None is network(X).probs


def test_algorithms_are_chosen_as_the_first_batch_of_a_size_runs(idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(2, 5))
    example = torch.randn(1, 1, 1, 1)
    network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(2, 5)}, 0.5, example_input=example).eval()
    timed, convolve = set(), functional.conv2d

    def noting(x: Tensor, *others: object) -> Tensor:
        timed.add((len(x), torch.backends.cudnn.benchmark))
        return convolve(x, *others)

    trunk = make_trunk(backbone, network.taps, example, "cudnn")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(functional, "conv2d", noting)
    OverlappedRunner(network, example, batch_sizes=(1, 16), trunk=trunk)
    assert timed == {(1, False), (16, True)}


def test_a_request_that_comes_while_another_thread_closes_finds_it_closed(
    network: EarlyExitNetwork, idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing is no request of another thread: the caller's mistake is to ask a closed runner."""
    runner, closing, asked = make_runner(network, X, exits="overlapped", batch_sizes=(1,)), Event(), Event()
    free = Captures.free

    def freeing(captures: Captures) -> None:
        closing.set()
        asked.wait(0.1)
        free(captures)

    monkeypatch.setattr(Captures, "free", freeing)
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(runner.close)
        closing.wait()
        with pytest.raises(RuntimeError, match="^this runner is closed$"):
            runner(X)
        asked.set()
        closed.result()


def test_close_waits_for_a_request_of_another_thread(network: EarlyExitNetwork, idle: None) -> None:
    runner, under_way, go_on = make_runner(network, X, exits="overlapped", batch_sizes=(1,)), Event(), Event()
    ((_, captured),) = runner._captured.items()
    launch = captured.graphs[0].launch

    def slow(stream: object) -> None:
        under_way.set()
        go_on.wait()
        launch(stream)

    captured.graphs[0].launch = slow
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(runner, X)
        under_way.wait()
        closed = pool.submit(runner.close)
        with pytest.raises(TimeoutError):
            closed.result(0.05)
        go_on.set()
        assert asked.result().label.shape == (1,)
        closed.result()


def test_a_flag_that_an_interrupt_has_left_refuses_nobody(network: EarlyExitNetwork, idle: None) -> None:
    runner = make_runner(network, X, exits="overlapped", batch_sizes=(1,))
    runner._under_way = True
    runner(X)


def test_another_thread_is_refused_while_a_request_is_under_way(network: EarlyExitNetwork, idle: None) -> None:
    runner, other = make_runner(network, X, exits="overlapped", batch_sizes=(1,)), ThreadPoolExecutor(1)
    ((_, captured),) = runner._captured.items()
    launch = captured.graphs[0].launch

    def meanwhile(stream: object) -> None:
        for call in (lambda: runner(X), runner.refresh):
            with pytest.raises(RuntimeError, match="in another thread's call"):
                other.submit(call).result()
        launch(stream)

    captured.graphs[0].launch = meanwhile
    runner(X)
    captured.graphs[0].launch = launch
    assert other.submit(runner, X).result().label.shape == (1,), "and not any more"


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0], TypeError, "x: got list, wants a torch.Tensor"),
        (X.double(), TypeError, "x: got torch.float64, wants torch.float32"),
        (X[:, :3], ValueError, r"x: got shape \[1, 3\], wants \[N, 4\]"),
        (X[0, 0], ValueError, r"wants \[N, 4\]"),
        (X[:0], ValueError, "N >= 1"),
        (X.to("meta"), ValueError, "x: got device meta, wants cpu or"),
        (X.to_sparse(), TypeError, "x: got a torch.sparse_coo tensor, wants a dense one"),
        (X.to_mkldnn(), TypeError, "x: got a torch._mkldnn tensor, wants a dense one"),
        (torch.nested.nested_tensor([*X]), TypeError, "x: got a nested tensor, wants a dense one"),
    ],
    ids=["no tensor", "dtype", "shape", "a number", "empty", "device", "sparse", "opaque", "nested"],
)
def test_bad_requests_launch_nothing(
    network: EarlyExitNetwork, idle: None, x: object, error: type[Exception], message: str
) -> None:
    runner = make_runner(network, X, exits="overlapped", batch_sizes=(1,))
    runner._captured[1].graphs[0].launch = lambda _stream: pytest.fail("something was launched")
    with pytest.raises(error, match=message):
        runner(x)


def storages() -> set[int]:
    """What tensors there are lie in."""
    gc.collect()
    return {one.untyped_storage()._cdata for one in gc.get_objects() if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize("exits", ["overlapped", "polled", "compact", "gated"])
def test_a_runner_is_there_once_and_gone_when_closed(exits: str, simulation: None) -> None:
    network, x = EarlyExitNetwork(SmallNet(), plain_heads(), 0.5).eval(), torch.randn(2, 3, 4, 4)
    options = {"exits": "polled", "compact": True} if exits == "compact" else {"exits": exits}
    make_runner(network, x, batch_sizes=(1, 2), trunk="cudnn", **options).close()
    before = storages()
    runner = make_runner(network, x, batch_sizes=(1, 2), trunk="cudnn", **options)
    other = copy.copy(runner)
    assert torch.equal(other(x).label, runner(x).label)
    del other
    gc.collect()
    runner(x)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a runner holds graphs of this process"):
            duplicate(runner)
    assert storages() > before
    runner.close()
    for ask in (runner.describe, runner.refresh, lambda: runner.trunk, lambda: runner(x)):
        with pytest.raises(RuntimeError, match="^this runner is closed$"):
            ask()
    assert storages() == before
