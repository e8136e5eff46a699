"""``ModuleHead``: an exit head that is any module, which runs as it is; only the check of its logits is fused."""

from typing import Any

from torch import Tensor, nn

from ..answers.exit_rule import ExitRule
from ..basics.arguments import check_dense, check_module
from ..listening.reading import parts_in_words
from .head import AuxHead, HeadRun, are_logits, run_once


class ModuleHead(AuxHead):
    """An early-exit head made of any module that turns a tap's output into logits [N, K].

    The module runs as it is, operator by operator, where a fused head's launch would run. Its logits are judged by the
    exit rule in the same launch that answers for other heads.
    """

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
        check_module("module", module)
        if not (num_classes is None or (type(num_classes) is int and num_classes > 0)):
            raise ValueError(f"num_classes: got {num_classes!r}, wants a positive int or None")
        device = next((each.device for each in module.parameters()), None)
        super().__init__(rule, device, num_classes=num_classes, return_probs=return_probs)
        self.module = module
        self.why_not_fused: str | None = None
        """The reason, if the network was given the module to fuse it."""
        self.training = self.rule.training = module.training  # and each layer of the module as it is

    def logits(self, x: Tensor) -> Tensor:
        """Return the module's logits [N, K], differentiably.

        Raises:
            ValueError: the module returned something else, or logits of another number of classes than before.
            RuntimeError: in training mode it has changed its input in place, which in eval mode it does not.
        """
        check_dense("x", x)
        copied = self.run is not None and self.run.writes_input
        x = x.clone() if copied else x
        version = x._version if self.training and not x.is_inference() else None
        y = self.module(x)
        if version is not None and x._version != version and not copied:
            raise RuntimeError(
                f"module: {type(self.module).__name__} changes its input in place in training mode, while the backbone "
                "goes on with it; wants inplace=False for its first layers"
            )
        if not are_logits(y, x):
            raise ValueError(f"module: returned {parts_in_words(y)}, wants logits [{x.shape[0]}, num_classes]")
        known = self._num_classes if self.run is None else self.run.num_classes
        if known not in (None, y.shape[1]):
            raise ValueError(f"module: returned {y.shape[1]} classes, wants {known}, as the head has")
        return y

    def describe(self) -> str:
        """Say that it is not fused, and what it costs."""
        because = "" if self.why_not_fused is None else f" ({self.why_not_fused})"
        costs = "" if self.run is None else f": {self.run.describe()}"
        return f"{type(self.module).__name__}, not fused{because}{costs}"

    def fields(self) -> dict[str, Any]:
        """Return the class of the module, which a checkpoint names but does not keep, and the head's arguments."""
        if type(self) is not ModuleHead:
            return super().fields()
        kind = type(self.module).__qualname__
        return {"module": kind, "num_classes": self.num_classes, "return_probs": self.return_probs}

    def check_on(self, tap: str, features: Tensor, *, autocasts: bool = False) -> HeadRun:
        """Run the module once in eval mode on the output of its tap, and return what was found; see the base class."""
        its = f"heads[{tap!r}]: its module {type(self.module).__name__}"
        try:
            return run_once(its, self.module, self.module, features)
        except ValueError as error:
            if self.why_not_fused is None:
                raise
            raise ValueError(f"{error}; to be fused it would have to be another: {self.why_not_fused}") from error
