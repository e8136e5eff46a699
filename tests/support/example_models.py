"""Small models for the tests of model/, and slow, plain reimplementations to compare with."""

import copy
import re
from collections.abc import Sequence

import pytest
import torch
from auxhead.kernels import HeadOutput, decide
from torch import Tensor, nn

#: For tests that take no ``device``.
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class SmallNet(nn.Module):
    """Three convolution blocks and a classifier; a fair sketch of what users have."""

    taps = ("block0", "block1", "block2")
    widths = (8, 12, 16)

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.block0 = self._block(3, 8, 1)
        self.block1 = self._block(8, 12, 2)
        self.block2 = self._block(12, 16, 2)
        self.fc = nn.Linear(16, classes)

    @staticmethod
    def _block(channels: int, width: int, stride: int) -> nn.Sequential:
        conv = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.block1(self.block0(x)))
        return self.fc(x.mean((2, 3)))


class Skipping(SmallNet):
    """Behind block2 it uses what block0 has returned, too."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.block0(x)
        beside = x.mean((2, 3))
        x = self.block2(self.block1(x))
        return self.fc(x.mean((2, 3)) + 0.5 * torch.cat([beside, beside], 1))


class Counting(nn.Module):
    """Counts the calls of a layer in a buffer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)


class Wide(nn.Module):
    """Its activations are large, so that little of what it needs is in the cache of PyTorch's allocator."""

    taps = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(64, 64, 1) for _ in range(3))
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.c(self.b(self.a(x))).mean((2, 3)))


def plain_head(channels: int, classes: int = 5) -> nn.Sequential:
    """An ordinary classifier whose weights are large enough to be sure now and then."""
    linear = nn.Linear(channels, classes)
    with torch.no_grad():
        linear.weight.mul_(20.0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)


def plain_heads(classes: int = 5) -> dict[str, nn.Sequential]:
    return {tap: plain_head(width, classes) for tap, width in zip(SmallNet.taps, SmallNet.widths, strict=True)}


def softmax_of(classifier: nn.Module, x: Tensor) -> Tensor:
    """The probabilities that a classifier stands for, whether or not it ends in a Softmax."""
    y = classifier(x)
    ends_in_softmax = any(isinstance(part, nn.Softmax) for part in classifier.modules())
    return y if ends_in_softmax else torch.softmax(y, dim=-1)


def assert_as_exact(actual: Tensor, same_dtype: Tensor, exact: Tensor) -> None:
    """The error against float64 is at most twice PyTorch's own in the same dtype (and two ulps of float32)."""
    assert actual.shape == exact.shape
    error = (actual.double() - exact).abs().max().item() if exact.numel() else 0.0
    allowed = 2 * (same_dtype.double() - exact).abs().max().item() if exact.numel() else 0.0
    assert error <= allowed + 2**-22 * max(1.0, exact.abs().max().item() if exact.numel() else 0.0), (error, allowed)


def in_double(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double().eval()


def answer_slowly(
    backbone: nn.Module,
    heads: dict[str, nn.Module],
    thresholds: Sequence[float],
    x: Tensor,
    temperatures: Sequence[float] | None = None,
) -> list[tuple[int, int, float, Tensor, float]]:
    """Sample by sample, in float64: (exit, label, confidence, probs, how far off the nearest decision was)."""
    trunk = in_double(backbone)
    seen: dict[str, Tensor] = {}
    for tap in heads:
        trunk.get_submodule(tap).register_forward_hook(lambda _m, _i, y, tap=tap: seen.__setitem__(tap, y.clone()))
    double_heads = {tap: in_double(head) for tap, head in heads.items()}
    temperatures = temperatures or [1.0] * len(heads)
    answers = []
    for i in range(x.shape[0]):
        with torch.no_grad():
            final = trunk(x[i : i + 1].double())[0]
            slack = 1.0
            for index, tap in enumerate(heads):
                logits = double_heads[tap](seen[tap])[0]
                probs = torch.softmax(logits / temperatures[index], 0)
                confidence = probs.max().item()
                if thresholds[index] < 1.0:
                    slack = min(slack, abs(confidence - thresholds[index]))
                if confidence > thresholds[index] and thresholds[index] < 1.0:
                    break
            else:
                index, probs = len(heads), torch.softmax(final, 0)
        if len(probs) > 1:
            top = probs.topk(2).values
            slack = min(slack, (top[0] - top[1]).item())
        answers.append((index, int(probs.argmax()), probs.max().item(), probs, slack))
    return answers


def suggested(error: BaseException) -> list[str]:
    """The names that a refused tap is answered with."""
    listing = re.search(r"(?:would work|it has):? (.*)$", str(error)).group(1)
    return [name for name in listing.split(", ") if name not in ("...", "none")]


class Branch(nn.Module):
    """A small convolution branch, as people write an exit head; it is not fused."""

    def __init__(self, channels: int, classes: int, inplace: bool) -> None:
        super().__init__()
        self.relu, self.drop = nn.ReLU(inplace=inplace), nn.Dropout(0.2)
        self.conv, self.bn = nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(self.relu(x.sub_(0.01) if self.relu.inplace else x - 0.01))))
        return self.fc(self.drop(x.mean((2, 3))))


def branch(channels: int, classes: int = 5, *, inplace: bool = False) -> Branch:
    """A branch that says something else of each sample, and is sure now and then."""
    made = Branch(channels, classes, inplace)
    with torch.no_grad():
        made.fc.weight.mul_(20)
        made.conv.weight.mul_(4)
        made.conv.bias.fill_(0.1)
    return made.eval()


def mixed_heads() -> dict[str, nn.Module]:
    """Heads of ``SmallNet`` that are modules, one of which writes to its input, and a fused one between them."""
    return {"block0": branch(8), "block1": plain_head(12), "block2": branch(16, inplace=True)}


@torch.no_grad()
def naive_answers(network: nn.Module, x: Tensor) -> list[HeadOutput]:
    """What every exit says of a batch, layer by layer: each head reads a copy of what its block returns."""
    backbone, said = network.backbone, []
    for block, head in zip((backbone.block0, backbone.block1, backbone.block2), network.heads, strict=True):
        x = block(x)
        rule = head.rule
        fused = (lambda y, head=head: head.linear(y.mean((2, 3)))) if hasattr(head, "linear") else head.logits
        classifier = getattr(head, "module", None) or fused
        said.append(decide(classifier(x.clone()), rule.temperature, rule.threshold, rule.criterion))
    return [*said, decide(backbone.fc(x.mean((2, 3))), 1.0, 1.0)]
