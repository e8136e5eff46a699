"""``AuxHead``: the base class of heads, what each kind must offer to networks, launches, training and checkpoints."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...kernels import ExitHead, HeadOutput
from ...kernels.launch.check_arguments import check_classes, check_input
from ..answers.exit_rule import ExitRule, own_rule
from ..basics.arguments import tensor_in_words
from ..listening.hooks import has_hooks, overridden
from ..listening.reading import BY_CHANNELS, Extract, parts_in_words
from ..listening.recorder import record
from ..listening.rounding import are_probabilities


class HeadRun(NamedTuple):
    """The facts that one run of a head on a few samples has shown."""

    num_classes: int
    parameters: int
    operators: int
    flops: int
    """Of convolutions and products, for one sample."""
    writes_input: bool

    def describe(self) -> str:
        """Say in words what the head costs."""
        copy = ", on a copy of the tap's output, which it changes in place" if self.writes_input else ""
        flops = f"{self.flops / 1e6:,.3g} MFLOPs a sample"
        return f"{self.operators} operators, {self.parameters:,} parameters, {flops}{copy}"


class AuxHead(nn.Module):
    """A head of a network: makes logits of a tap's output, and by its rule an answer of these.

    A kind of head is a direct subclass. It has to define ``logits``; what else is here runs it operator by operator,
    and lets the launch that answers for other heads judge its logits. A kind whose launch reads the tap's output itself
    (:class:`FusedAuxHead`) overrides the rest; one that checkpoints are to keep defines ``fields``, and has a
    form and a maker in saving/description.py.
    """

    #: Attributes that a launch depends on, besides what ``depends_on`` names.
    options: tuple[str, ...] = ("return_probs",)
    #: How launches pool what they read: logits not at all.
    pool: str = "none"
    pool_size: tuple[int, int] = (1, 1)
    #: Features after pool and flatten that it takes; None where only a run tells.
    in_features: int | None = None
    #: The one size of maps that it reads; None for any size.
    map_size: tuple[int, int] | None = None
    #: What the network's dry run has found out about the head, where it has run it; None before.
    run: HeadRun | None = None

    rule: ExitRule
    return_probs: bool

    def __init__(
        self, rule: ExitRule | float, device: torch.device | str | None, *, num_classes: int | None, return_probs: bool
    ) -> None:
        """Take a copy of a rule on a device, and the number of classes if it is known before the dry run."""
        super().__init__()
        check_classes("num_classes", num_classes or 2)
        if not isinstance(return_probs, bool):
            raise TypeError(f"return_probs: got {return_probs!r}, wants a bool")
        self._num_classes = num_classes
        self.rule = own_rule(rule, device)
        self.return_probs = return_probs

    @property
    def num_classes(self) -> int:
        """Number of classes, K."""
        found = self._num_classes if self.run is None else self.run.num_classes
        if found is None:
            raise ValueError("num_classes: is not known before network.check_taps(example_input)")
        return found

    @classmethod
    def kind(cls) -> type["AuxHead"]:
        """Return the direct subclass of ``AuxHead`` that this is or comes from."""
        line = cls.__mro__[: cls.__mro__.index(AuxHead)]
        return next((each for each in reversed(line) if issubclass(each, AuxHead)), AuxHead)

    def forward(self, x: Tensor) -> HeadOutput:
        """Answer for what the tap returned."""
        return self.answer(self.launch_input(x))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [N, K] for what the tap returned, differentiably, before temperature and softmax."""
        raise NotImplementedError(f"{type(self).__name__}: has no logits, which a head must define")

    def features(self, x: Tensor) -> Tensor:
        """Return the part of a tap's output that ``logits_of_features`` reads: all of it."""
        return x

    def logits_of_features(self, features: Tensor) -> Tensor:
        """Return the logits [N, K] for features, differentiably."""
        return self.logits(features)

    def launch_input(self, x: Tensor) -> Tensor:
        """Return what an exit launch reads for this head: the logits."""
        return self.logits(x)

    def answer(self, logits: Tensor) -> HeadOutput:
        """Answer for what ``launch_input`` returned, by PyTorch's operators."""
        return self.rule.judge(logits, return_probs=self.return_probs)

    def as_exit_head(self) -> ExitHead:
        """Return the tensors and sizes that a launch for a whole network reads: the very ones, not copies."""
        rule = self.rule
        return ExitHead(
            None, None, rule.temperature_tensor, rule.threshold_tensor, self.pool, self.pool_size, rule.criterion
        )

    def parts(self) -> list[tuple[str, nn.Module]]:
        """Name the modules that ``logits`` calls and a launch stands for: none, they run."""
        return []

    def depends_on(self) -> Iterable[tuple[Mapping[str, Any], str]]:
        """Name the objects that a launch depends on, as keys of the dicts that hold them."""
        return [(self._modules, "rule"), *self.rule.depends_on()]

    def why_not_launched(self) -> str | None:
        """Return what of the head a launch would not follow, a layer that is another one now, say; None if nothing."""
        return overridden(self, self.kind())

    def describe(self) -> str:
        """Say what it computes, and what it costs."""
        costs = "" if self.run is None else f": {self.run.describe()}"
        return f"{type(self).__name__}, not fused{costs}"

    def fields(self) -> dict[str, Any]:
        """Return the arguments that make it again, for a checkpoint; ``ValueError`` if its state has more to it."""
        raise TypeError(f"is a {type(self).__name__}, of which no checkpoint is known")

    def check_on(self, tap: str, features: Tensor, *, autocasts: bool = False) -> HeadRun | None:
        """Check that it reads the output of its tap, by one run in eval mode; returns what a run has shown.

        Under autocast a head may have another dtype than the output.

        Raises:
            ValueError: it cannot, or returns something else than logits; the message names the tap.
        """
        return run_once(f"heads[{tap!r}]: its {type(self).__name__}", self, self.logits, features)

    def settle(self, found: HeadRun | None, features: Tensor, *, autocasts: bool) -> None:
        """Take over what ``check_on`` returned, once no head of the network is refused."""
        self.run = found


def run_once(its: str, module: nn.Module, call: Callable[[Tensor], Any], features: Tensor) -> HeadRun:
    """Call a module on a tap's output in eval mode; ``ValueError``, begun with ``its`` name, unless it gives logits."""
    x = features.detach()
    reads = f"the output {list(x.shape)} of the tap"
    try:
        recording = record(module, x, evaluating=True, call=call)
    except Exception as error:  # whatever a user's module may raise
        raise ValueError(f"{its} cannot read {reads}: {' '.join(str(error).split()):.300}") from error
    y, operations = recording.output, recording.operations
    if not are_logits(y, x):
        raise ValueError(f"{its} makes of {reads} {parts_in_words(y)}, wants logits [{x.shape[0]}, num_classes]")
    if y.device != x.device:
        raise ValueError(f"{its} returns logits on {y.device}, wants {x.device}, as the output of the tap")
    if y.shape[1] > 1 and are_probabilities(y):
        raise ValueError(f"{its} returns probabilities, wants logits: leave out its last softmax")
    return HeadRun(
        num_classes=y.shape[1],
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        operators=sum(not each.is_view for each in operations),
        flops=sum(each.flops for each in operations) // x.shape[0],
        writes_input=any(read.leaf == "input" and read.written is not None for op in operations for read in op.reads),
    )


def are_logits(y: Any, x: Tensor) -> bool:
    """Return whether a module has made [N, K] of floats of a batch of N."""
    return isinstance(y, Tensor) and y.ndim == 2 and y.shape[0] == x.shape[0] and y.is_floating_point()


def check_same_classes(tap: str, classes: int, logits: Tensor) -> None:
    """Raise ``ValueError`` for a head that has another number of classes than the backbone, which may be replaced."""
    if logits.ndim != 2:
        raise ValueError(f"backbone: returned {tensor_in_words(logits)}, wants logits [N, {classes}]")
    if classes != logits.shape[1]:
        raise ValueError(f"heads[{tap!r}]: has {classes} classes, wants {logits.shape[1]}, as the backbone has")


def check_head_device(tap: str, head: AuxHead, features: Tensor) -> None:
    """Raise ``ValueError`` unless a head, whose tensors others may use, is on the device of what it reads."""
    if any(map(is_lazy, head.parameters())):
        return  # none has them yet: it will be put there
    for name, parameter in head.named_parameters():
        if parameter.device != features.device:
            raise ValueError(
                f"heads[{tap!r}]: its {name} is on {parameter.device}, wants {features.device}, where the output of "
                f"the tap is: call heads[{tap!r}].to({str(features.device)!r}) before"
            )


def check_followed(taps: Sequence[str], heads: Sequence[AuxHead]) -> None:
    """Raise ``ValueError`` for a head that was given hooks, or a way to answer of its own: its answers alone follow."""
    for tap, head in zip(taps, heads, strict=True):
        why = overridden(head, head.kind())
        if (why := "carries hooks" if why is None and has_hooks(head) else why) is not None:
            raise ValueError(
                f"heads[{tap!r}]: {why}, which logits, training and calibration would pass over; wants that on "
                "its layers, where its answers follow, too"
            )


def with_layout(tap: str, extract: Extract, features: Tensor, head: AuxHead, channels: set[int]) -> Extract:
    """Return an extract with the layout of its tensor, which the dry run has made, and told what are its channels.

    Heads with pool="none" read elements in the order in which they are, and pool="first" is for tokens alone. A width
    that the head has already and that one layout alone has is as certain as what operators take for channels.

    Raises:
        ValueError: nothing tells the layout, or operators disagree; says what to write.
    """
    if extract.layout is not None or features.ndim not in BY_CHANNELS or head.pool == "none":
        return extract
    layouts = BY_CHANNELS[features.ndim]
    if features.ndim == 3 and head.pool == "first":
        return replace(extract, layout="NTD")
    if len(channels) == 1 and (layout := layouts.get(next(iter(channels)))) is not None:
        return replace(extract, layout=layout)
    fitting = [layout for layout in layouts.values() if _fits(head, Extract(layout=layout).view(features))]
    if not channels and len(fitting) == 1:
        return replace(extract, layout=fitting[0])
    why = "operators that read it disagree" if channels else "no operator that makes or reads it tells"
    item = "" if extract.item is None else f"item={extract.item!r}, "
    first, second = layouts.values()
    raise ValueError(
        f"heads[{tap!r}]: reads {list(features.shape)}, and {why} which dimension is the channels; wants "
        f"extract={{{tap!r}: Extract({item}layout={first!r})}}, or {second!r}"
    )


def _fits(head: AuxHead, features: Tensor) -> bool:
    if head.in_features is None:
        return False
    try:
        return check_input(features, head.pool, head.pool_size) == head.in_features
    except ValueError:
        return False
