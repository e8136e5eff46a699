"""Layers whose kernels take long, so that launches do not bound what is made of them: narrow and wide ones."""

from typing import Any

import torch
from torch import Tensor, nn

from .program import device


class Narrow(nn.Module):
    """One kernel of some 300 us in 8 blocks: a GPU has room for others beside it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cummax(dim=1).values  # a block goes along each row


def narrow_input() -> Tensor:
    """[8, 262144]: a row for each block."""
    return torch.randn(8, 1 << 18, device=device())


class Wide(nn.Sequential):
    """A convolution of some 100 us, and a ReLU, in thousands of blocks: they fill any GPU."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        self.to(device()).eval()


def wide_input() -> Tensor:
    """[64, 64, 56, 56], 51 MB; on the CPU, where nobody takes the time, smaller."""
    samples, pixels = (64, 56) if torch.cuda.is_available() else (4, 8)
    return torch.randn(samples, 64, pixels, pixels, device=device())


def pooled_head() -> nn.Sequential:
    """A head as people write it for the output of a ``Wide`` layer; it could be fused."""
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10), nn.Softmax(dim=1))
    return head.to(device()).eval()


class Beside(nn.Module):
    """A trunk on a stream of high priority, and a branch for a side stream; subclasses run them, right or wrong.

    What is around that is right: the trunk waits for the caller and the caller for the trunk, and the answers' memory
    is not used again before the caller is done with it.
    """

    def __init__(self, layer: type[nn.Module] = Narrow) -> None:
        super().__init__()
        self.first, self.second, self.third, self.branch = layer(), layer(), layer(), layer()
        self.trunk, self.side = torch.cuda.Stream(priority=-1), torch.cuda.Stream()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        caller = torch.cuda.current_stream()
        self.trunk.wait_stream(caller)
        with torch.cuda.stream(self.trunk):
            answers = self.run(x)
        caller.wait_stream(self.trunk)
        for answer in answers:
            answer.record_stream(caller)
        return answers

    def run(self, x: Tensor) -> tuple[Tensor, ...]:
        """Right: fork after what the branch reads, hold that until the streams have joined, record the answer."""
        y = self.first(x)
        self.side.wait_stream(self.trunk)
        with torch.cuda.stream(self.side):
            beside = self.branch(y)
        z = self.second(y)
        self.trunk.wait_stream(self.side)
        beside.record_stream(self.trunk)
        return z, beside


class OnCallersStream(Beside):
    """The same with the trunk on the caller's stream, which is the default one."""

    def forward(self, x: Any) -> tuple[Tensor, ...]:
        self.trunk = torch.cuda.current_stream()
        return self.run(x)
