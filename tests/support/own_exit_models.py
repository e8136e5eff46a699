"""Models with exits of their own, of which tests vary one part, and what they compare."""

from collections.abc import Callable
from typing import Any

import torch
from support.multi_exit_models import CLASSES, block
from torch import Tensor, nn


def images(samples: int = 4) -> Tensor:
    return torch.randn(samples, 3, 16, 16)


class Net(nn.Module):
    """Two blocks and a third; heads, and what is returned, by methods that others replace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.b1, self.b2, self.b3 = block(3, 8), block(8, 12), block(12, 16)
        self.f1, self.f2, self.f3 = nn.Linear(8, CLASSES), nn.Linear(12, CLASSES), nn.Linear(16, CLASSES)
        self.make()

    def make(self) -> None:
        pass

    def one(self, a: Tensor) -> Tensor:
        return self.f1(a.mean((2, 3)))

    def two(self, b: Tensor) -> Tensor:
        return self.f2(b.mean((2, 3)))

    def last(self, c: Tensor) -> Tensor:
        return self.f3(c.mean((2, 3)))

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        b = self.b2(a)
        return self.answers(self.one(a), self.two(b), self.last(self.b3(b)))

    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return [one, two, last]


def variant(make: Callable[[Net], object] | None = None, **methods: Callable[..., Any]) -> type[Net]:
    """Return a kind of ``Net`` with other methods."""
    return type("Variant", (Net,), methods if make is None else methods | {"make": make})


def parts(**made: Callable[[], Any]) -> Callable[[Net], None]:
    """Return a ``make`` that gives a net parts."""

    def make(net: Net) -> None:
        for name, each in made.items():
            setattr(net, name, each())

    return make


def parameter(*sizes: int, value: float = 1.0) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.full(sizes, value))


Clamped = variant(one=lambda net, a: Net.one(net, a).clamp(-1, 1))


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


class MaskOfSamples(Net):
    """Drops whole samples, and the same features in two layers: no dropout that heads know."""

    def one(self, a: Tensor) -> Tensor:
        y = a.mean((2, 3))
        return self.f1(y * torch.empty(len(y), 1).bernoulli_(0.5).div_(0.5) if self.training else y)

    def two(self, b: Tensor) -> Tensor:
        y = b.mean((2, 3))
        if self.training:
            mask = torch.empty_like(y).bernoulli_(0.5).div_(0.5)
            y = y * mask * mask
        return self.f2(y)


def change(model: nn.Module) -> None:
    """Make something else of all that may become something else."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.2, 1.5) if tensor.ndim < 2 else tensor.normal_()
    if hasattr(model, "T"):
        model.T = 0.5


def exits(answers: Any) -> list[Tensor]:
    return list(answers.unbind(1)) if isinstance(answers, Tensor) else list(answers)


def seeded(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    torch.manual_seed(1)
    return run()


def pooled(classes: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes))
