"""Captures of runners on a GPU, failed ones among them, and the memory left when a runner goes."""

import gc

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from auxhead.model.runners.graph_runner import GraphRunner
from support.example_models import needs_gpu
from support.graph_runner_cases import (
    assert_identical,
    assert_same,
    clear_batches,
    exits_at,
    images,
    made,
    network,
)
from torch import Tensor, nn

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


# What cannot be captured


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 0.0 * x.float().mean().item())


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.float().sum() > -1e9 else -x


class Failing(nn.Module):
    """Fails in the second capture only: the first one measures the segments."""

    captures = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            self.captures += 1
            if self.captures == 2:
                raise ValueError("not twice")
        return x


@pytest.mark.parametrize(
    ("asks", "block"), [(Asking, "block0"), (Branching, "block1"), (Failing, "block2"), (Asking, "block2")]
)
def test_a_layer_that_cannot_be_captured_is_named_and_nothing_else_suffers(way: str, asks: type, block: str) -> None:
    sound = network()
    sound_runner, (x,) = made(sound, way), clear_batches(sound, [5])
    wanted = sound_runner(x)
    net = network()
    net.backbone.get_submodule(block).append(asks().eval())
    for _ in range(2):
        net.backbone.get_submodule(block)[3].captures = 0
        with pytest.raises(RuntimeError, match=rf"backbone: layer '{block}\.3' cannot be captured.*eager"):
            made(net, way)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert not torch.cuda.is_current_stream_capturing()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    assert_identical(sound_runner(x), wanted)  # captured before
    assert_same(made(sound, way)(x), wanted)  # captured after
    assert_same(net(x), wanted)  # what could not be captured still runs


# Lives and deaths


@pytest.mark.parametrize(
    ("ended", "trunk"), [("closed", "cudnn"), ("dropped", "as_is"), ("dropped", "cudnn"), ("closed by with", "as_is")]
)
def test_the_end_of_a_runner_frees_its_memory(way: str, ended: str, trunk: str) -> None:
    net, x = network(), images(5)

    def live() -> GraphRunner | None:
        runner = made(net, way, trunk=trunk)
        runner(x)
        if ended == "closed":
            runner.close()
            runner.close()
        elif ended == "closed by with":
            with runner as entered:
                assert entered is runner
        return None if ended == "dropped" else runner

    def held() -> int:
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    held()
    first = live()  # what libraries allocate once and keep is theirs
    before = held()
    second = live()
    assert held() <= before
    for runner in (first, second):
        if runner is not None:
            with pytest.raises(RuntimeError, match="this runner is closed"):
                runner(x)
            with pytest.raises(RuntimeError, match="this runner is closed"):
                runner.refresh()


class Waiting:
    """Waits for the device as it goes."""

    def __del__(self) -> None:
        torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["a runner", "something that waits"])
def test_garbage_does_not_break_a_capture(way: str, kind: str) -> None:
    net, other = network(), network()
    (x,) = clear_batches(net, [8])
    garbage = [made(other, way) if kind == "a runner" else Waiting()]
    if kind == "a runner":
        garbage[0](x)
    garbage[0].itself = garbage[0]  # only the collector can free it

    def drop(*_: object) -> None:
        if torch.cuda.is_current_stream_capturing():
            garbage.clear()
            gc.set_threshold(1, 1, 1)

    handle = net.backbone.block1.register_forward_pre_hook(drop)
    thresholds = gc.get_threshold()
    try:
        runner = made(net, way, (8,))
    finally:
        gc.set_threshold(*thresholds)
        handle.remove()
    assert not garbage and gc.isenabled()
    assert_same(runner(x), net(x))


def test_many_gates() -> None:
    """34 nested conditions."""
    blocks, x = 34, torch.randn(3, 16, device="cuda")
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(blocks)), nn.Linear(16, 4))
    heads = {str(index): FusedAuxHead(16, 4, pool="none") for index in range(blocks)}
    net = EarlyExitNetwork(layers, heads, 1.0).cuda().eval()
    runner = made(net, "gated", (4,), example=x)
    for index in (0, 20, 33, 34):
        with exits_at(net, index):
            found, wanted = runner(x), net(x)
        assert found.exit_index.eq(index).all()
        top = wanted.probs.sort(1, descending=True).values
        assert_same(found, wanted, 1e-3, top[:, 0] - top[:, 1] <= 1e-3)
