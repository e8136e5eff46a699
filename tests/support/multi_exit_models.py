"""Models with exits of their own, in the styles in which people write them."""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 7
WIDTHS = (8, 12, 16)


def block(channels: int, width: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, width, 3, 2, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True))


class Pooling(nn.Module):
    """A head class of one's own: a pool, written as one likes, and a linear layer."""

    def __init__(self, width: int, pool: Callable[[Tensor], Tensor], windows: int = 1) -> None:
        super().__init__()
        self.pool = pool
        self.fc = nn.Linear(width * windows, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(x))


class Perceptron(nn.Module):
    """A head with a norm, a hidden layer and dropout, all but its layers by functions."""

    def __init__(self, width: int, activation: Callable[[Tensor], Tensor], hidden: int = 10) -> None:
        super().__init__()
        self.activation = activation
        self.norm, self.drop1, self.drop2 = nn.LayerNorm(width), nn.Dropout(0.1), nn.Dropout(0.2)
        self.hidden, self.fc = nn.Linear(width, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop2(self.activation(self.hidden(self.drop1(self.norm(x.mean((2, 3))))))))


class Hidden(nn.Module):
    """A head with a hidden layer and functions between its layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.hidden, self.fc = nn.Linear(width, 10), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.hidden(self.norm(x.mean((2, 3))))))


def pool_head(width: int, *after: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES), *after)


class InAList(nn.Module):
    """Blocks and heads in lists, called in a loop; returns a list."""

    def __init__(self, *heads: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(c, width) for c, width in zip((3, *WIDTHS), WIDTHS, strict=False))
        self.exits = nn.ModuleList(heads or map(pool_head, WIDTHS))

    def forward(self, x: Tensor) -> Any:
        answers = []
        for layer, head in zip(self.blocks, self.exits, strict=True):
            x = layer(x)
            answers.append(head(x))
        return answers


class Answer(NamedTuple):
    main: Tensor
    aux: Tensor


@dataclass
class Outputs:
    first: Tensor
    last: Tensor


class Named(nn.Module):
    """Named layers and heads; ``shaped`` gives what is returned its form."""

    def __init__(
        self, shaped: Callable[..., Any], first: nn.Module | None = None, last: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.shaped = shaped
        self.stem = block(3, 8)
        self.body = block(8, 12)
        self.exit1 = pool_head(8) if first is None else first
        self.classifier = pool_head(12) if last is None else last

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        one = self.exit1(x)
        return self.shaped(one, self.classifier(self.body(x)))


class WithoutModules(nn.Module):
    """Pools and softmaxes by functions in the forward; only linear layers are modules. A residual sum is tapped."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.more, self.body = block(3, 8), nn.Conv2d(8, 8, 3, padding=1), block(8, 12)
        self.relu = nn.ReLU(inplace=True)
        self.fc1, self.fc2 = nn.Linear(8, CLASSES), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        x = self.relu(x + self.more(x))
        one = self.fc1(F.adaptive_avg_pool2d(x, 1).flatten(1)).softmax(1)
        x = self.body(x)
        return one, F.softmax(self.fc2(x.flatten(2).mean(-1)), dim=1)


class Branching(nn.Module):
    """After MSDNet: two scales a block, in lists, heads with a convolution on the last scale."""

    class Head(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.m = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
            self.pool, self.linear = nn.AvgPool2d(2), nn.Linear(4 * width, CLASSES)

        def forward(self, x: list[Tensor]) -> Tensor:
            y = self.pool(self.m(x[-1]))
            return self.linear(y.view(y.size(0), -1))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine, self.coarse, self.down = (nn.Conv2d(8, 8, 3, s, 1) for s in (1, 1, 2))

        def forward(self, x: list[Tensor]) -> list[Tensor]:
            return [F.relu(self.fine(x[0])), F.relu(self.coarse(x[1]) + self.down(x[0]))]

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))
        self.classifier = nn.ModuleList(self.Head(8) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        scales, answers = [x, self.down(x)], []
        for layer, head in zip(self.blocks, self.classifier, strict=True):
            scales = layer(scales)
            answers.append(head(scales))
        return answers


class Tokens(nn.Module):
    """After ViT and DeiT: heads for the first token, for the mean of all, and for the mean of all but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(16, CLASSES) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        answers = []
        for index, (layer, norm, head) in enumerate(zip(self.blocks, self.norms, self.heads, strict=True)):
            x = layer(x)
            y = norm(x)
            answers.append(head(y.mean(1) if index == 1 else y[:, 1:].mean(1) if index == 2 else y[:, 0]))
        return tuple(answers)


def in_a_dict(one: Tensor, last: Tensor) -> dict[str, Tensor]:
    return {"last": last, "first": one}


#: Each with the taps, pools and "has code of its own" of its early exits, the places of all, and the last head's name.
STYLES: dict[str, tuple[Callable[[], nn.Module], list[tuple[str, str, bool]], list[Any], str]] = {
    "heads in a list": (
        InAList, [("blocks.0", "avg", False), ("blocks.1", "avg", False)], [0, 1, 2], "exits.2",
    ),
    "classes of one's own": (
        lambda: InAList(
            Pooling(8, lambda x: x.mean((2, 3))),
            Pooling(12, lambda x: x.amax((-1, -2))),
            Pooling(16, lambda x: x.mean(3).mean(2)),
        ),
        [("blocks.0", "avg", False), ("blocks.1", "max", False)], [0, 1, 2], "exits.2",
    ),
    "grids of windows": (
        lambda: InAList(
            nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(32, CLASSES)),
            Pooling(12, lambda x: x.flatten(1), 16),
            Pooling(16, lambda x: F.adaptive_avg_pool2d(x, 2).flatten(1), 4),
        ),
        [("blocks.0", "max 2x2", False), ("blocks.1", "none", False)], [0, 1, 2], "exits.2",
    ),
    "a tuple with names, the last first": (
        lambda: Named(lambda one, last: Answer(last, one)), [("stem", "avg", False)], [1, 0], "classifier",
    ),
    "a dict, the last first": (lambda: Named(in_a_dict), [("stem", "avg", False)], ["first", "last"], "classifier"),
    "a dataclass": (lambda: Named(Outputs), [("stem", "avg", False)], ["first", "last"], "classifier"),
    "softmax layers": (
        lambda: Named(in_a_dict, pool_head(8, nn.Softmax(1)), pool_head(12, nn.Softmax(dim=-1))),
        [("stem", "avg", False)], ["first", "last"], "classifier",
    ),
    "log-softmax": (
        lambda: Named(Outputs, pool_head(8, nn.LogSoftmax(1)), pool_head(12, nn.LogSoftmax(1))),
        [("stem", "avg", False)], ["first", "last"], "classifier",
    ),
    "functions": (WithoutModules, [("relu", "avg", False)], [0, 1], "fc2"),
    "hidden layers": (
        lambda: InAList(
            Hidden(8),
            nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 9), nn.ReLU(inplace=True), nn.Linear(9, CLASSES)
            ),
            Hidden(16),
        ),
        [("exits.0.norm", "none", True), ("blocks.1", "avg", False)], [0, 1, 2], "exits.2",  # a batch norm
    ),
    "hidden layers that are not fused": (
        lambda: InAList(
            Perceptron(8, torch.tanh),
            nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(),
                nn.Linear(9, CLASSES),
            ),
            Perceptron(16, F.relu),
        ),
        [("blocks.0", "", True), ("exits.1.3", "none", True)], [0, 1, 2], "exits.2",
    ),
    "a last exit that is a convolution": (
        lambda: Named(Outputs, last=nn.Sequential(nn.Conv2d(12, CLASSES, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
        [("stem", "avg", False)], ["first", "last"], "classifier",
    ),
    "features that branch": (
        Branching,
        [("classifier.0.m", "avg 2x2", True), ("classifier.1.m", "avg 2x2", True)], [0, 1, 2], "classifier.2",
    ),
    "tokens": (
        Tokens,
        [("norms.0", "first", True), ("norms.1", "avg", True), ("blocks.2", "", True)], [0, 1, 2, 3],
        "heads.3",
    ),
}  # fmt: skip


def probabilities(model: nn.Module, style: str, x: Tensor) -> list[Tensor]:
    """What a model of a style says at each of its exits."""
    with torch.no_grad():
        answers = model(x)
    said = [getattr(answers, place) if is_dataclass(answers) else answers[place] for place in STYLES[style][2]]
    return said if style in ("softmax layers", "functions") else [y.softmax(1) for y in said]


def confident(model: nn.Module) -> nn.Module:
    """Let its heads be sure now and then."""
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.Linear):
                part.weight.mul_(20.0)
    return model.eval()
