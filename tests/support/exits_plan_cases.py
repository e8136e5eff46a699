"""Networks whose exits are planned, the answers they must give, and eager passes as on a GPU without one."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from auxhead.kernels import HeadOutput
from auxhead.model import EarlyExitNetwork, ExitResult, FusedAuxHead
from auxhead.model.network import eager_pass
from auxhead.model.network.eager_pass import run_eagerly
from support import stream_order
from support.head_plan_cases import differ as differ
from torch import Tensor, nn

CLASSES = 8
TAPS = ("first", "second", "third")


class Steps(nn.Module):
    """Three layers and a classifier; the outputs of all layers have the sizes that heads of ``CHANGES`` take."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)
        self.fc = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return self.fc(x.mean((2, 3)))


def images(samples: int, side: int = 4) -> Tensor:
    """The first samples are always the same."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(64, 3, side, side, generator=generator)[:samples] * 2


def make_network(device: torch.device | str = "cpu") -> EarlyExitNetwork:
    """Every exit answers for some of the first 8 images, none of which is near a threshold."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        heads = {tap: FusedAuxHead(8, CLASSES, pool_size=2) for tap in TAPS}
        net = EarlyExitNetwork(Steps(), heads, example_input=images(2)).eval()
    with torch.no_grad():
        for head in net.fused_heads:
            head.linear.weight.mul_(8)
        waiting = torch.arange(8)
        for head, logits in zip(net.fused_heads, net.logits(images(8)), strict=False):
            confidence = torch.softmax(logits, 1).amax(1)[waiting]
            ordered = confidence.sort().values
            head.rule.threshold = ordered[-3:-1].mean().item()  # two leave
            waiting = waiting[confidence <= head.rule.threshold]
    return net.to(device)


def unplanned(net: EarlyExitNetwork, x: Tensor) -> ExitResult:
    """The answer of heads that are called one by one."""
    return run_eagerly(net.backbone, net.taps, net.fused_heads, x, stop=False)


def assert_same(found: ExitResult, wanted: ExitResult) -> None:
    assert torch.equal(found.exit_index, wanted.exit_index), (found.exit_index, wanted.exit_index)
    assert torch.equal(found.label, wanted.label)
    torch.testing.assert_close(found.confidence, wanted.confidence)
    assert (found.probs is None) == (wanted.probs is None)
    if found.probs is not None:
        torch.testing.assert_close(found.probs, wanted.probs)
    for name, one, other in zip(ExitResult._fields, found, wanted, strict=True):
        if one is not None:
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device), name
            assert one.is_contiguous() and not one.requires_grad, name


@contextmanager
def heads_called() -> Iterator[list[FusedAuxHead]]:
    """While open, heads that are called one by one are added to the list that is returned."""
    called: list[FusedAuxHead] = []
    forward = FusedAuxHead.forward

    def counted(head: FusedAuxHead, x: Tensor) -> HeadOutput:
        called.append(head)
        return forward(head, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedAuxHead, "forward", counted)
        yield called


@contextmanager
def as_on_a_gpu(handle: int = 0) -> Iterator[None]:
    """Let eager passes take the CPU for a GPU, whose current stream has a handle; kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        stream_order.patched(patch)
        for name, value in (
            ("has_streams", lambda _x: True),
            ("is_capturing", lambda _device: False),
            ("beside_captures", nullcontext),
            ("current_handle", lambda _device: handle),
        ):
            patch.setattr(eager_pass, name, value)
        patch.setattr(eager_pass, "may_be_destroyed", lambda _stream: False)
        patch.setattr(torch.cuda, "current_device", lambda: None)
        yield
