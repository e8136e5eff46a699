"""``FusedAuxHead``: the module that takes the place of a pool-flatten-linear classifier."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import ExitHead, HeadOutput, check_input, check_pool, fused_head, pooled_features
from ..kernels.head_arguments import head_dtypes, head_dtypes_in_words
from .arguments import check_module, is_plain, tensor_in_words
from .exit_rule import ExitRule, own_rule
from .fold_head import match_or_fold
from .head_plans import HeadPlans
from .rule_order import wait_for_write


class FusedAuxHead(nn.Module):
    """An early-exit head whose forward is one kernel launch.

    ``forward`` answers (:class:`~auxhead.kernels.HeadOutput`); ``logits`` is the same head as differentiable PyTorch,
    for training. Shapes, dtypes and errors of the input are those of :func:`auxhead.kernels.fused_head`.
    """

    #: Attributes that a launch depends on, besides what ``holders`` names.
    options = ("pool", "pool_size", "return_probs")

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        *,
        pool: str = "avg",
        pool_size: int | tuple[int, int] = 1,
        bias: bool = True,
        dropout: float = 0.0,
        rule: ExitRule | float = 1.0,
        return_probs: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a head with fresh parameters, initialised as by ``torch.nn.Linear``.

        Args:
            in_features: features after pool and flatten (C * p_h * p_w for a map), or None to take them from the first
                input, as ``torch.nn.LazyLinear`` does.
            num_classes: K.
            pool: "avg", "max", "first" (token) or "none".
            pool_size: windows of a map under "avg" and "max".
            bias: whether the linear layer has one.
            dropout: probability, applied to the features by ``logits`` in training mode.
            rule: when a sample may exit, of which the head takes a copy; a number is the threshold of a ``max_prob``
                rule, of which 1.0 never exits.
            return_probs: whether the answer carries the probabilities.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()
        for name, value in (("in_features", in_features), ("num_classes", num_classes)):
            if not (isinstance(value, int) and value > 0) and not (name == "in_features" and value is None):
                raise ValueError(f"{name}: got {value!r}, wants a positive int")
        linear = (
            nn.LazyLinear(num_classes, bias=bias, device=device, dtype=dtype)
            if in_features is None
            else nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        )
        self.pool = pool
        self.pool_size = check_pool(pool, pool_size)
        if not (isinstance(dropout, (int, float)) and 0.0 <= dropout <= 1.0):
            raise ValueError(f"dropout: got {dropout!r}, wants a probability in [0, 1]")
        self.dropout = dropout
        self.return_probs = return_probs
        self.rule = own_rule(rule, device)
        self.linear: nn.Linear = linear
        self._plans = HeadPlans()
        self._source_path = "linear"  # name of the linear layer in the nn.Sequential it comes from, if any

    @classmethod
    def from_module(
        cls, module: nn.Module, *, rule: ExitRule | float = 1.0, return_probs: bool = True
    ) -> "FusedAuxHead":
        """Make a head of an ``nn.Sequential`` classifier, sharing its parameters (they are the same tensors).

        Known are AdaptiveAvgPool2d or AdaptiveMaxPool2d, Flatten, Dropout, one Linear and a final Softmax, in the usual
        orders and with Identity anywhere, nested or not. Dropout acts in ``logits`` alone, and ``logits`` stops short
        of the Softmax. In eval mode more is known, whose steps are folded into parameters that are new: BatchNorm1d and
        further Linears without activations between them, Conv2d of 1x1 and BatchNorm2d before an average pool.

        Raises:
            ValueError: the module is not of a known shape; the message says why, and of a class with a forward of its
                own what to write instead.
            TypeError: it is no module.
        """
        check_module("module", module)
        pattern = match_or_fold(module)
        if isinstance(pattern, str):
            raise ValueError(f"module: {pattern}")
        linear = pattern.linear
        head = cls(
            linear.in_features, linear.out_features, pool=pattern.pool, pool_size=pattern.pool_size,
            dropout=pattern.dropout, return_probs=return_probs, device="meta",  # its own parameters are dropped
        )  # fmt: skip
        head.linear, head._source_path = linear, pattern.linear_path
        head.rule = own_rule(rule, linear.weight.device)
        return head.train(module.training)

    @property
    def num_classes(self) -> int:
        """Number of classes, K."""
        return self.linear.out_features

    def forward(self, x: Tensor) -> HeadOutput:
        """Answer for a batch in one launch; dropout does not act, in training mode either."""
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            return self._call(x)
        return self._plans.answer(self, x, self._call)

    def _call(self, x: Tensor) -> HeadOutput:
        """Answer by the operator, which checks everything and follows autograd, modes and transforms."""
        linear = self.linear
        if isinstance(x, Tensor) and isinstance(linear, nn.LazyLinear):
            self._take_width_in_forward(x)
        self._check_linear()
        weight: Tensor = linear.weight
        bias: Tensor | None = linear.bias
        read: torch.cuda.Event | None = None
        if not torch.compiler.is_compiling() and isinstance(x, Tensor):
            read = wait_for_write(self.rule, x)
        if _autocasts(x):  # as autocast does for the nn.Linear this replaces
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        output = fused_head(
            x,
            weight,
            bias,
            pool=self.pool,
            pool_size=self.pool_size,
            criterion=self.rule.criterion,
            temperature=self.rule.temperature_tensor,
            threshold=self.rule.threshold_tensor,
            return_probs=self.return_probs,
        )
        if read is not None:
            read.record(torch.cuda.current_stream(x.device))
        return output

    def _take_width_in_forward(self, x: Tensor) -> None:
        weight = self.linear.weight
        if not _autocasts(x) and (x.dtype, x.device) != (weight.dtype, weight.device):
            raise ValueError(
                f"x: got {x.dtype} on {x.device}, wants {weight.dtype} on {weight.device}, as the head's parameters"
            )
        with torch.inference_mode(False), torch.no_grad():  # parameters made in inference mode could not train
            self.take_width_of(x.clone())

    def take_width_of(self, x: Tensor) -> None:
        """Give a head that was made without a width that of its first input; after an error it is without one again."""
        try:
            self.logits(x)
        except BaseException:
            if isinstance(self.linear, nn.LazyLinear):
                # PyTorch makes one parameter after the other, and could not go on where there was memory for some.
                for parameter in self.linear.parameters():
                    if not isinstance(parameter, nn.UninitializedParameter):
                        parameter.data = parameter.data.new_empty(0)
                        parameter.__class__ = nn.UninitializedParameter  # type: ignore[assignment]  # as PyTorch does
            raise

    def _check_linear(self) -> None:
        """Refuse a linear layer whose weight is computed by hooks, which a fused head never calls."""
        own = vars(self.linear)
        if ("weight" in own or "bias" in own) and "weight" not in own.get("_former_parameters", ()):  # of DataParallel
            raise ValueError(
                "linear: carries hooks that make its weight (of torch.nn.utils.weight_norm or prune, say), which a "
                "fused head never calls, so that it is an old one; wants none: remove them, or use parametrizations"
            )

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [N, K] in x's dtype, differentiably, before temperature and softmax."""
        check_input(x, self.pool, self.pool_size)
        return self.logits_of_features(pooled_features(x, self.pool, self.pool_size))

    def features(self, x: Tensor) -> Tensor:
        """Return what of a tap's output ``logits_of_features`` reads: [N, D], pooled, in the parameters' dtype."""
        return pooled_features(x, self.pool, self.pool_size).to(self.linear.weight.dtype)

    def logits_of_features(self, features: Tensor) -> Tensor:
        """Return the logits [N, K] for pooled features [N, D], differentiably."""
        return self.linear(F.dropout(features, self.dropout, self.training))

    def launch_input(self, x: Tensor) -> Tensor:
        """Return what an exit launch reads for this head: the tap's output itself."""
        return x

    def answer(self, x: Tensor) -> HeadOutput:
        """Answer for what ``launch_input`` returned."""
        return self(x)

    def holders(self) -> Iterable[tuple[Mapping[str, Any], str]]:
        """Name the objects that a launch depends on, as keys of the dicts that hold them."""
        own = self._modules
        linear, rule = own["linear"], own["rule"]
        assert isinstance(linear, nn.Module) and isinstance(rule, ExitRule)
        of_linear = [(linear._parameters, "weight"), (linear._parameters, "bias")]
        return [(own, "linear"), (own, "rule"), *of_linear, *rule.holders()]

    def describe(self) -> str:
        """Say what it computes."""
        return f"pool {self.pool!r}, {self.num_classes} classes"

    def as_exit_head(self) -> ExitHead:
        """Return the tensors and sizes that a launch for a whole network reads: the very ones, not copies."""
        self._check_linear()
        for name, tensor in (("weight", self.linear.weight), ("bias", self.linear.bias)):
            if tensor is not None and (not is_plain(tensor) or tensor.is_neg()):  # read as it lies in memory
                got = "a lazily negated one" if is_plain(tensor) else tensor_in_words(tensor)
                raise ValueError(f"linear.{name}: got {got}, wants a plain tensor")
        weight = self.linear.weight
        if weight.dtype not in head_dtypes(weight.device):
            wants = head_dtypes_in_words(weight.device)
            raise ValueError(f"linear.weight: got {weight.dtype} on {weight.device}, wants {wants}")
        return ExitHead(
            self.linear.weight,
            self.linear.bias,
            self.rule.temperature_tensor,
            self.rule.threshold_tensor,
            self.pool,
            self.pool_size,
            self.rule.criterion,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Accept the parameters of a classifier whose linear layer has another name, as an ``nn.Sequential``'s has."""
        its = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
        if not any(key == "linear.weight" or key.startswith("linear.parametrizations.") for key in its):
            paths = {key.rpartition(".")[0] for key in its if key != "rule._extra_state"}
            if any(key.startswith(f"{self._source_path}.") for key in its):
                paths = {self._source_path}  # there may be more than weight and bias, those of a parametrization
            if len(paths) == 1:
                _rename(state_dict, f"{prefix}{paths.pop()}.", f"{prefix}linear.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Show what the linear layer below does not."""
        return f"pool={self.pool!r}, pool_size={self.pool_size}, dropout={self.dropout}"


def _autocasts(x: Tensor) -> bool:
    return isinstance(x, Tensor) and x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def _rename(state_dict: dict[str, Tensor], old_prefix: str, new_prefix: str) -> None:
    for key in [key for key in state_dict if key.startswith(old_prefix)]:
        state_dict[new_prefix + key[len(old_prefix) :]] = state_dict.pop(key)
