"""A network for CIFAR in two streams that hand activations to each other: without waits, and with them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from auxhead.model.guides.steps import Graphs
from torch import Tensor, nn

from .program import Made, Program, device, planted


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU())


class TwoStreamCifar(nn.Module):
    """Two stacks of convolutions, each on a stream; after the first stage each reads what the other has made, too."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = convolution(3, 64), convolution(3, 64)
        self.left_mixed, self.right_mixed = convolution(128, 64), convolution(128, 64)
        self.fc = nn.Linear(128, 10)
        self.left_stream, self.right_stream = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
        self.to(device()).eval()

    def wait(self, waiting: torch.cuda.Stream, *others: torch.cuda.Stream) -> None:
        """Let a stream wait for others: here it does not."""

    @contextmanager
    def use(self, stream: torch.cuda.Stream, *read: Tensor) -> Iterator[None]:
        """Run on a stream, which reads tensors of another one."""
        with torch.cuda.stream(stream):
            yield

    def forward(self, x: Tensor) -> Tensor:
        caller = torch.cuda.current_stream()
        self.wait(self.left_stream, caller)
        self.wait(self.right_stream, caller)
        with self.use(self.left_stream, x):
            left = self.left(x)
        with self.use(self.right_stream, x):
            right = self.right(x)
        self.wait(self.left_stream, self.right_stream)
        self.wait(self.right_stream, self.left_stream)
        with self.use(self.left_stream, right):
            left_features = self.left_mixed(torch.cat([left, right], dim=1)).mean((2, 3))
        with self.use(self.right_stream, left):
            right_features = self.right_mixed(torch.cat([right, left], dim=1)).mean((2, 3))
        self.wait(caller, self.left_stream, self.right_stream)
        with self.use(caller, left_features, right_features):
            return self.fc(torch.cat([left_features, right_features], dim=1))


class InOrder(TwoStreamCifar):
    """The same, corrected."""

    def wait(self, waiting: torch.cuda.Stream, *others: torch.cuda.Stream) -> None:
        for other in others:
            waiting.wait_stream(other)

    @contextmanager
    def use(self, stream: torch.cuda.Stream, *read: Tensor) -> Iterator[None]:
        with super().use(stream):
            yield
        for tensor in read:
            tensor.record_stream(stream)


def without_waits() -> Made:
    # so many images that the kernels outlast their launches
    return TwoStreamCifar(), torch.randn(512, 3, 32, 32, device=device())


def with_waits() -> Made:
    """In a graph, with so few images that both streams find room."""
    x = torch.randn(8, 3, 32, 32, device=device())
    return Graphs(InOrder(), x), x


PROGRAMS: dict[str, Program] = {
    # the caller's stream, on which the end runs, has no higher priority than the side stream
    "cifar_without_waits": planted(without_waits, "race", may_find=("freed-in-use", "priority", "full-device")),
    "cifar_with_waits": Program(with_waits),
}
