"""``ModuleHead``: an exit head that is any module, which runs as it is; only the check of its logits is fused."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...kernels import ExitHead, HeadOutput
from ...kernels.launch.head_arguments import check_classes
from ..answers.exit_rule import ExitRule, own_rule
from ..basics.arguments import check_dense, check_module
from ..listening.hooks import overridden
from ..listening.reading import parts_in_words
from ..listening.recorder import record
from ..listening.rounding import are_probabilities
from .fused_aux_head import FusedAuxHead


class ModuleHead(nn.Module):
    """An early-exit head made of any module that turns a tap's output into logits [N, K].

    The module runs as it is, operator by operator, where a fused head's launch would run. Its logits are judged by the
    exit rule in the same launch that answers for other heads.
    """

    #: Attributes that a launch depends on, besides what ``holders`` names.
    options = ("return_probs",)

    def __init__(
        self,
        module: nn.Module,
        *,
        num_classes: int | None = None,
        rule: ExitRule | float = 1.0,
        return_probs: bool = True,
    ) -> None:
        """Make a head of a module, which is shared, and whose mode the head takes over.

        Args:
            module: returns logits, not probabilities. One that writes to its input in place (an in-place ReLU, say)
                gets a copy of it: the backbone goes on with the tap's output at the same time.
            num_classes: K, if it is known before the network's dry run finds it.
            rule: when a sample may exit, of which the head takes a copy; a number is the threshold of a ``max_prob``
                rule, of which 1.0 never exits.
            return_probs: whether the answer carries the probabilities.
        """
        super().__init__()
        check_module("module", module)
        if not (num_classes is None or (type(num_classes) is int and num_classes > 0)):
            raise ValueError(f"num_classes: got {num_classes!r}, wants a positive int or None")
        check_classes("num_classes", num_classes or 2)
        self.module = module
        self.rule = own_rule(rule, next((each.device for each in module.parameters()), None))
        self.return_probs = return_probs
        self.run: ModuleRun | None = None
        """What the network's dry run has found out about the module; None before."""
        self.why_not_fused: str | None = None
        """The reason, if the network was given the module to fuse it."""
        self._num_classes = num_classes
        self.training = self.rule.training = module.training  # and each layer of the module as it is

    @property
    def num_classes(self) -> int:
        """Number of classes, K."""
        found = self._num_classes if self.run is None else self.run.num_classes
        if found is None:
            raise ValueError("num_classes: is not known before network.check_taps(example_input)")
        return found

    def forward(self, x: Tensor) -> HeadOutput:
        """Answer for what the tap returned."""
        return self.answer(self.launch_input(x))

    def logits(self, x: Tensor) -> Tensor:
        """Return the module's logits [N, K], differentiably.

        Raises:
            ValueError: the module returned something else, or logits of another number of classes than before.
            RuntimeError: in training mode it has changed its input in place, which in eval mode it does not.
        """
        check_dense("x", x)
        if self.run is not None and self.run.writes_input:
            x = x.clone()
        version = x._version if self.training and not x.is_inference() else None
        y = self.module(x)
        if version is not None and x._version != version and not (self.run and self.run.writes_input):
            raise RuntimeError(
                f"module: {type(self.module).__name__} changes its input in place in training mode, while the backbone "
                "goes on with it; wants inplace=False for its first layers"
            )
        if not (isinstance(y, Tensor) and y.ndim == 2 and y.shape[0] == x.shape[0] and y.is_floating_point()):
            raise ValueError(f"module: returned {parts_in_words(y)}, wants logits [{x.shape[0]}, num_classes]")
        known = self._num_classes if self.run is None else self.run.num_classes
        if known not in (None, y.shape[1]):
            raise ValueError(f"module: returned {y.shape[1]} classes, wants {known}, as the head has")
        return y

    def launch_input(self, x: Tensor) -> Tensor:
        """Return what an exit launch reads for this head: the logits."""
        return self.logits(x)

    def answer(self, logits: Tensor) -> HeadOutput:
        """Answer for what ``launch_input`` returned, by PyTorch's operators."""
        return self.rule.judge(logits, return_probs=self.return_probs)

    def features(self, x: Tensor) -> Tensor:
        """Return what of a tap's output ``logits_of_features`` reads: all."""
        return x

    def logits_of_features(self, features: Tensor) -> Tensor:
        """Return the logits [N, K] for features, differentiably."""
        return self.logits(features)

    def as_exit_head(self) -> ExitHead:
        """Return the rule's tensors, which a launch for a whole network reads beside the logits."""
        rule = self.rule
        return ExitHead(None, None, rule.temperature_tensor, rule.threshold_tensor, "none", (1, 1), rule.criterion)

    def parts(self) -> list[tuple[str, nn.Module]]:
        """Name the modules that a launch stands for: none, the module runs."""
        return []

    def why_not_launched(self) -> str | None:
        """Return what of the head a launch would not follow; None if nothing."""
        return overridden(self, ModuleHead)

    def holders(self) -> Iterable[tuple[Mapping[str, Any], str]]:
        """Name the objects that a launch depends on, as keys of the dicts that hold them."""
        return [(self._modules, "rule"), *self.rule.holders()]

    def describe(self) -> str:
        """Say that it is not fused, and what it costs."""
        because = "" if self.why_not_fused is None else f" ({self.why_not_fused})"
        costs = "" if self.run is None else f": {self.run.describe()}"
        return f"{type(self.module).__name__}, not fused{because}{costs}"

    def check_on(self, tap: str, features: Tensor) -> "ModuleRun":
        """Run the module once in eval mode on the output of its tap, and return what was found.

        Raises:
            ValueError: the module cannot read it, or returns something else than logits; the message names the tap.
        """
        try:
            return _run_once(tap, self.module, features)
        except ValueError as error:
            if self.why_not_fused is None:
                raise
            raise ValueError(f"{error}; to be fused it would have to be another: {self.why_not_fused}") from error


AuxHead = FusedAuxHead | ModuleHead
"""A head of a network, of either kind."""


class ModuleRun(NamedTuple):
    """What one run of a head's module on a few samples has shown."""

    num_classes: int
    parameters: int
    operators: int
    flops: int
    """Of convolutions and products, for one sample."""
    writes_input: bool

    def describe(self) -> str:
        """Say in words what the module costs."""
        copy = ", on a copy of the tap's output, which it changes in place" if self.writes_input else ""
        flops = f"{self.flops / 1e6:,.3g} MFLOPs a sample"
        return f"{self.operators} operators, {self.parameters:,} parameters, {flops}{copy}"


def _run_once(tap: str, module: nn.Module, features: Tensor) -> ModuleRun:
    x = features.detach()
    its = f"heads[{tap!r}]: its module {type(module).__name__}"
    reads = f"the output {list(x.shape)} of the tap"
    try:
        recording = record(module, x, evaluating=True)
    except Exception as error:  # whatever a user's module may raise
        raise ValueError(f"{its} cannot read {reads}: {' '.join(str(error).split()):.300}") from error
    y, operations = recording.output, recording.operations
    if not (isinstance(y, Tensor) and y.ndim == 2 and y.shape[0] == x.shape[0] and y.is_floating_point()):
        raise ValueError(f"{its} makes of {reads} {parts_in_words(y)}, wants logits [{x.shape[0]}, num_classes]")
    if y.device != x.device:
        raise ValueError(f"{its} returns logits on {y.device}, wants {x.device}, as the output of the tap")
    if y.shape[1] > 1 and are_probabilities(y):
        raise ValueError(f"{its} returns probabilities, wants logits: leave out its last softmax")
    return ModuleRun(
        num_classes=y.shape[1],
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        operators=sum(not each.is_view for each in operations),
        flops=sum(each.flops for each in operations) // x.shape[0],
        writes_input=any(y.leaf == "input" and y.written is not None for each in operations for y in each.reads),
    )
