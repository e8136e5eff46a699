"""Heads by themselves on a GPU, a target of tuning for each shape: launched, chained, checked; and their peers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import HeadOutput, decide
from ...kernels.launch.choose_config import Layers, choose_config, chosen_by_rule
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.head_view import HeadView, head_view
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.library_rule import config_of_library
from ...kernels.reference.fused_head import logits_of
from ...model import FusedAuxHead, Trunk
from ...model.basics.streams import stream_pair
from ...model.listening.taps import listening
from .captured import OwnGraph, chain
from .peers import NaiveHead
from .subject import Subject


class Target(NamedTuple):
    """All heads of one shape in a network, or one of no network, which one entry of a tuned table serves."""

    shape: HeadShape
    model: str = ""
    taps: tuple[str, ...] = ()
    """Taps of the heads of that shape; of a head of no network none."""

    @property
    def rule(self) -> LaunchConfig:
        """The rule's configuration, launched where nothing was tuned: the baseline of every measurement."""
        return chosen_by_rule(self.shape)

    def __str__(self) -> str:
        if not self.taps:
            return str(self.shape)
        return f"{self.model} {self.shape.dtype}, batch {self.shape.samples}, {', '.join(self.taps)}"


#: Launches that are compared while other work runs beside them.
_CHECKED_LAUNCHES = 5
#: Roundings of an answer's dtype that it may be off by, however exact PyTorch's logits are by luck.
_FLOOR_ROUNDINGS = 4
#: It may be off as well by what logits come to that are twice as far off as PyTorch's, of all samples and classes: its
#: few probabilities that count may by luck all be nearer. And by what one rounding to x's dtype of the largest logit
#: does, or of a logit of this size: the few logits of one sample may be exact (twelve heads in bfloat16 were off by 0.2
#: to 1.9 thousandths of a probability), and sums in float32 of thousands of features are off by a millionth.
_LEAST_LOGIT = 1 / 32
#: Error that a peer may have in float32, over a fused head's: torch.compile's kernels add one product after another
#: and were off by 2.4 times that (512 features, 100 classes, H200). That is a peer less exact, not a wrong one.
_PEERS_ROUNDING = 4
#: The work beside them: products of square matrices.
_BUSY_SIZE = 2048
_BUSY_PRODUCTS = 50


class AloneHead:
    """A head and an input of it, on one CUDA device."""

    def __init__(self, head: FusedAuxHead, x: Tensor, device: torch.device | None = None) -> None:
        """Launch ``head`` on ``x``, whatever its tables say; choose a launch for ``device`` if both are on "meta"."""
        self.head = head
        self.x = x
        self.device = device or x.device

    @property
    def view(self) -> HeadView:
        """The input as the kernel reads it."""
        return head_view(tuple(self.x.shape), self.x.stride(), self.head.pool, self.head.pool_size)

    @property
    def shape(self) -> HeadShape:
        """The shape by which tuned tables know the head."""
        pool_max = self.head.pool == "max"
        return HeadShape.of(self.view, self.head.num_classes, pool_max=pool_max, dtype=self.x.dtype)

    def launch(self, config: LaunchConfig) -> HeadOutput:
        """Launch on the current stream."""
        from ...kernels.fused_head import launch_fused_head  # there is no Triton for some platforms

        head, rule = self.head, self.head.rule
        return launch_fused_head(
            self.x, self.view, head.linear.weight, head.linear.bias, rule.temperature_tensor, rule.threshold_tensor,
            pool_max=head.pool == "max", return_probs=head.return_probs, config=config, hidden=head.hidden_layers(),
        )  # fmt: skip

    @property
    def chosen(self) -> LaunchConfig:
        """The configuration that the operator launches here: by the tuned table of the device, else by rule."""
        return choose_config(
            self.view, self.head.num_classes, pool_max=self.head.pool == "max", dtype=self.x.dtype, device=self.device,
            hidden=self.head.hidden_layers(),
        )  # fmt: skip

    @property
    def bytes_moved(self) -> int:
        """The bytes that a head has to read and write: what it pools, its parameters, and a fused head's answer."""
        parameters, samples = [*self.head.parameters()], self.x.shape[0]
        probs = self.head.num_classes * torch.float32.itemsize if self.head.return_probs else 0
        answer = probs + sum(dtype.itemsize for dtype in (torch.int64, torch.float32, torch.bool))
        return prod(self.view.shape) * self.x.itemsize + sum(one.nbytes for one in parameters) + samples * answer

    @property
    def other_way(self) -> LaunchConfig:
        """The way that the rule does not take: a library's product, or, where it takes that, programs of ours."""
        classes, hidden = self.head.num_classes, self.head.hidden_layers()
        shape = self.shape._replace(classes=hidden.rows(classes))
        if not self.chosen.by_library:
            return config_of_library(shape, classes)
        layers = Layers(classes, hidden.weight is not None, hidden.eps is not None)
        return chosen_by_rule(shape, layers, may_use_library=False)

    def chain(self, config: LaunchConfig) -> OwnGraph[HeadOutput]:
        """Capture launches one after another."""
        return chain(lambda: self.launch(config), self.device)

    def wrong(self, config: LaunchConfig) -> str | None:
        """Check answers of launches beside other work; return in words what is wrong with them, or None."""
        with self._busy(), torch.no_grad():
            answers = [self.launch(config) for _ in range(_CHECKED_LAUNCHES)]
        for out in answers:
            wrong = self.wrong_answer(out)
            if wrong is not None:
                return wrong
            if not (torch.equal(out.confidence, answers[0].confidence) and torch.equal(out.label, answers[0].label)):
                return "two launches on the same input differ"
        return None

    def wrong_answer(self, answer: HeadOutput, *, peer: bool = False) -> str | None:
        """Check one answer, the fused head's or a peer's, which may be less exact; return what is wrong, or None."""
        exact, off_by_pytorch, logits_off = self._truth
        assert exact.probs is not None
        least = max(2.0 * off_by_pytorch, _FLOOR_ROUNDINGS * torch.finfo(answer.confidence.dtype).eps)
        allowed = (exact.confidence * (1 - exact.confidence) * logits_off).clamp(min=least)
        if peer and answer.confidence.dtype == torch.float32:
            allowed *= _PEERS_ROUNDING
        off = (answer.confidence.double() - exact.confidence).abs()
        if answer.probs is not None:
            off = torch.maximum(off, (answer.probs.double() - exact.probs).abs().amax(1))
        if not bool((off <= allowed).all()):  # NaN, too
            worst = int((off / allowed).argmax())
            return f"probabilities are off by {off[worst]:.2g}, {allowed[worst]:.2g} being allowed"
        chosen = exact.probs.gather(1, answer.label[:, None])[:, 0]
        if not bool((exact.confidence - chosen <= 2 * allowed).all()):
            return "a label is not that of the largest probability"
        return None

    @cached_property
    def _truth(self) -> tuple[HeadOutput, float, float]:
        """The answer in float64, how far PyTorch's probabilities are off, and how far logits over T may be."""
        head, x, heat = self.head, self.x, self.head.rule.temperature
        bias = head.linear.bias
        with torch.no_grad():
            exact = logits_of(
                x.double(), head.linear.weight.double(), None if bias is None else bias.double(),
                head.pool, head.pool_size, head.hidden_layers().to(torch.float64),
            )  # fmt: skip
            logits = head.logits(x).double()
            answer = decide(exact, heat, head.rule.threshold)
            assert answer.probs is not None
            off_by_pytorch = (torch.softmax(logits / heat, dim=1) - answer.probs).abs().max().item()
            off, largest = ((logits - exact) / heat).abs().max().item(), (logits / heat).abs().max().item()
        return answer, off_by_pytorch, max(2.0 * off, max(largest, _LEAST_LOGIT) * torch.finfo(x.dtype).eps)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Run products of matrices on the trunk's stream; the caller launches on the side stream meanwhile."""
        streams = stream_pair(self.device)
        caller = torch.cuda.current_stream(self.device)
        for stream in streams:
            stream.wait_stream(caller)
        with torch.cuda.stream(streams.trunk):
            matrix = torch.ones(_BUSY_SIZE, _BUSY_SIZE, dtype=self.x.dtype, device=self.device)
            for _ in range(_BUSY_PRODUCTS):
                matrix @ matrix
        with torch.cuda.stream(streams.side):
            yield
        torch.cuda.synchronize(self.device)


def heads_of(subject: Subject, trunk: Trunk) -> list[AloneHead]:
    """Return the heads of a network, each with what its tap gives it on a trunk, as it lies in memory there."""
    features: list[Tensor] = []
    x = subject.example.contiguous(memory_format=trunk.memory_format)

    def keep(_index: int, y: Tensor) -> None:
        features.append(y.clone())

    with torch.no_grad(), listening(trunk.module, subject.network.taps, keep, trunk.reading):
        trunk.module(x)
    return [AloneHead(head, x) for head, x in zip(subject.heads, features, strict=True)]


#: Variants of a head alone: fused, the plain chain of operators that it replaces, that through torch.compile, and fused
#: in the way that the rule does not take. All
#: are timed as chains of launches in CUDA graphs of ours. So torch.compile chooses kernels as "max-autotune" does but
#: makes no graphs: that mode's own ones copy inputs and are looked up by the host at every call, which heads in a
#: captured network are not, and which would be all that is seen of a few microseconds. Peers do not hand out the
#: probabilities, which is in torch.compile's favour.
FUSED, EAGER, COMPILED, OTHER_WAY = "fused", "eager", "compiled", "other way"
#: Calls before a capture: the first compiles, and kernels are chosen by timing them when they first run.
_WARM_UP = 3

#: Launches a head or its peer on the head's input, on the current stream.
Launch = Callable[[], HeadOutput]


def _compiled(head: AloneHead) -> Launch:
    torch.compiler.reset()  # what was compiled for other heads would count against the limit on recompilations
    compiled = torch.compile(NaiveHead(head.head), mode="max-autotune-no-cudagraphs", dynamic=False)
    with torch.no_grad():
        for _ in range(_WARM_UP):
            compiled(head.x)
    return partial(compiled, head.x)


#: Functions that make a head ready to be launched, by variant; they compile where that is needed.
LAUNCHES: dict[str, Callable[[AloneHead], Launch]] = {
    FUSED: lambda head: partial(head.launch, head.chosen),
    EAGER: lambda head: partial(NaiveHead(head.head), head.x),
    COMPILED: _compiled,
    OTHER_WAY: lambda head: partial(head.launch, head.other_way),
}
#: Variants of a head of a network.
PEERS = (FUSED, EAGER, COMPILED)
