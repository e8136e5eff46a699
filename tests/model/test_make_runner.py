"""``make_runner`` without a GPU: the eager runner on every trunk, and what the others say; see test_runners_gpu.py."""

import re

import pytest
import torch
from auxhead.kernels import ExitBuffers
from auxhead.model import (
    EagerRunner,
    EarlyExitNetwork,
    GatedRunner,
    OverlappedRunner,
    PolledRunner,
    make_runner,
)
from auxhead.model.runners.table import EXITS
from support.example_models import SmallNet, plain_heads
from torch import Tensor

pytestmark = pytest.mark.usefixtures("without_interpreter")
RUNNERS = {"overlapped": OverlappedRunner, "polled": PolledRunner, "gated": GatedRunner}


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 8, 8)


def network(rules: object = None) -> EarlyExitNetwork:
    """Exits of random images mix: a sample in three leaves at each head."""
    net = EarlyExitNetwork(SmallNet(), plain_heads(), 0.9 if rules is None else rules, example_input=images(1)).eval()
    if rules is None:
        with torch.no_grad():
            for head, logits in zip(net.heads, net.logits(images(64)), strict=False):
                head.rule.threshold = torch.softmax(logits, 1).amax(1).quantile(0.66).item()
    return net


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_eager_runner_answers_as_the_network_now(trunk: str) -> None:
    """Batches of any size and layout, by rules and, once it is refreshed, by weights that change."""
    net, x = network(), images(7)
    wide = torch.zeros(7, 3, 8, 16)
    wide[..., ::2] = x
    with make_runner(net, images(2), exits="eager", trunk=trunk) as runner:
        assert isinstance(runner, EagerRunner)
        wanted = net(x)
        assert wanted.exit_index.unique().numel() > 1
        for same in (x, x.to(memory_format=torch.channels_last), wide[..., ::2], x.clone().requires_grad_()):
            found = runner(same)
            assert torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.label, wanted.label)
            torch.testing.assert_close(found.confidence, wanted.confidence)
            torch.testing.assert_close(found.probs, wanted.probs)
            assert not found.confidence.requires_grad
        assert torch.equal(runner(x[:1]).exit_index, wanted.exit_index[:1])
        for index in (3, 2, 1, 0):
            net.set_rules({tap: float(place != index) for place, tap in enumerate(SmallNet.taps)})
            assert runner(x).exit_index.eq(index).all()
        with torch.no_grad():
            net.backbone.block0[0].weight.mul_(3.0)
        runner.refresh()
        torch.testing.assert_close(runner(x).probs, net(x).probs)


@pytest.mark.parametrize("exits", RUNNERS)
def test_graphs_need_a_gpu(exits: str, recwarn: pytest.WarningsRecorder) -> None:
    """An error leaves no hooks, and no half-made runner complains."""
    net = network(1.0)
    for make in (lambda *a, **o: make_runner(*a, exits=exits, **o), RUNNERS[exits]):
        with pytest.raises(ValueError, match="example_input: on cpu, wants a CUDA device; exits='eager' runs on any"):
            make(net, images(1))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    assert not recwarn.list


@pytest.mark.parametrize("exits", EXITS)
def test_bad_arguments_are_named(exits: str) -> None:
    """Batch sizes are positive ints in a sequence, the network has heads, the overlapped runner alone forks."""
    net = network(1.0)
    with pytest.raises(ValueError, match="exits: got 'sometimes', wants one of .*'polled'"):
        make_runner(net, images(1), exits="sometimes")
    with pytest.raises(TypeError, match="network: got SmallNet, wants an EarlyExitNetwork"):
        make_runner(SmallNet().eval(), images(1), exits=exits)
    if exits != "overlapped":
        with pytest.raises(ValueError, match=re.escape(f"forks: got () with exits='{exits}', wants None")):
            make_runner(net, images(1), exits=exits, forks=())
    for sizes in ((), (0,), (1, -2), (1.0,), (True,), ("8",), (1, "8"), (1, None), range(2, -1, -1)):
        wanted = re.escape(f"batch_sizes: got {list(sizes)}, wants positive ints")
        for given in (sizes, (size for size in sizes)):  # a generator is read once, and named all the same
            with pytest.raises(ValueError, match=wanted):
                make_runner(net, images(1), exits=exits, batch_sizes=given)
    for size in (8, 1.5):
        with pytest.raises(TypeError, match=f"batch_sizes: got {size}, wants a sequence"):
            make_runner(net, images(1), exits=exits, batch_sizes=size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_answers_are_float32_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        buffers = ExitBuffers.allocate(2, 3, 4, with_probs=True, device=torch.device("cpu"))
    finally:
        torch.set_default_dtype(default)
    assert buffers.confidence.dtype == buffers.probs.dtype == torch.float32
    label, exit_index, confidence, probs = buffers.answer(buffers.packed_answer)
    assert [t.dtype for t in (label, exit_index, confidence, probs)] == [torch.int64] * 2 + [torch.float32] * 2
