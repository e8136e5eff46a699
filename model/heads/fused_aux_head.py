"""``FusedAuxHead``: the module that takes the place of a pool-flatten-linear classifier."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import ExitHead, HeadOutput, HiddenLayers, fused_head
from ...kernels.launch.check_arguments import check_countable, check_input, check_pool
from ...kernels.reference.fused_head import pooled_features
from ...kernels.reference.hidden_layers import NO_LAYERS
from ..answers.exit_rule import ExitRule, own_rule
from ..answers.rule_order import wait_for_write
from ..basics.arguments import check_dense, check_module
from ..listening.hooks import overridden, why_not_plain
from .fold_head import match_or_fold
from .head import AuxHead, HeadRun
from .head_layers import (
    HiddenStack,
    check_map_size,
    check_readable,
    lazy_after_errors,
    make_hidden_stack,
    rename_layers,
)
from .repeats import Repeats, answer


class FusedAuxHead(AuxHead):
    """An early-exit head, with a hidden layer and a norm or without, whose forward is one kernel launch.

    ``forward`` answers (:class:`~auxhead.kernels.HeadOutput`); ``logits`` is the same head as differentiable PyTorch,
    for training. Shapes, dtypes and errors of the input are those of :func:`auxhead.kernels.fused_head`.

    Example:
        >>> head = FusedAuxHead(64, num_classes=10, rule=0.9)  # pools, multiplies, and is sure above 0.9
        >>> answer = head(torch.randn(8, 64, 7, 7))
        >>> answer.probs.shape, answer.label.dtype, answer.exit.dtype
        (torch.Size([8, 10]), torch.int64, torch.bool)
    """

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
        hidden_features: int | None = None,
        activation: str = "relu",
        hidden_bias: bool = True,
        hidden_dropout: float = 0.0,
        norm: bool = False,
        rectifies: bool = False,
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
            bias: whether the last linear layer has one.
            dropout: probability, applied to the features by ``logits`` in training mode.
            hidden_features: outputs of a hidden linear layer before the last one, at most 1,024; None: there is none.
            activation: after the hidden layer: "relu", "gelu", "gelu_tanh" or "hardswish".
            hidden_bias: whether the hidden layer has one.
            hidden_dropout: probability after the activation, likewise.
            norm: whether a LayerNorm over all features comes before the linear layers.
            rectifies: whether a ReLU comes before the pool.
            rule: when a sample may exit, of which the head takes a copy; a number is the threshold of a ``max_prob``
                rule, of which 1.0 never exits.
            return_probs: whether the answer carries the probabilities.
            device: of the parameters.
            dtype: of the parameters.
        """
        for name, value in (("in_features", in_features), ("num_classes", num_classes)):
            if not (type(value) is int and value > 0) and not (name == "in_features" and value is None):
                raise ValueError(f"{name}: got {value!r}, wants a positive int")
        if not isinstance(bias, bool):
            raise TypeError(f"bias: got {bias!r}, wants a bool")
        super().__init__(rule, device, num_classes=num_classes, return_probs=return_probs)
        hidden = make_hidden_stack(
            in_features, hidden_features, norm=norm, rectifies=rectifies, activation=activation,
            hidden_bias=hidden_bias, hidden_dropout=hidden_dropout, device=device, dtype=dtype,
        )  # fmt: skip
        last_features = in_features if hidden_features is None else hidden_features
        linear = (
            nn.LazyLinear(num_classes, bias=bias, device=device, dtype=dtype)
            if last_features is None
            else nn.Linear(last_features, num_classes, bias=bias, device=device, dtype=dtype)
        )
        self.pool = pool
        self.pool_size = check_pool(pool, pool_size)
        if not (isinstance(dropout, (int, float)) and 0.0 <= dropout <= 1.0):
            raise ValueError(f"dropout: got {dropout!r}, wants a probability in [0, 1]")
        self.dropout = dropout
        if hidden is not None:
            self._modules["hidden"] = hidden
        self.linear: nn.Linear = linear
        self._repeats: Repeats[Callable[[Tensor], HeadOutput]] = Repeats()
        self._source_paths: dict[str, str] = {}  # names of layers in the nn.Sequential they come from, if any

    @classmethod
    def from_module(
        cls, module: nn.Module, *, rule: ExitRule | float = 1.0, return_probs: bool = True
    ) -> "FusedAuxHead":
        """Make a head of an ``nn.Sequential`` classifier, sharing its parameters (they are the same tensors).

        Known are a ReLU, AdaptiveAvgPool2d or AdaptiveMaxPool2d, Flatten, LayerNorm, Dropout, Linear, and after a ReLU,
        GELU or Hardswish a second Linear, and a final Softmax; in this order, with what is missing left out and
        Identity anywhere, nested or not. A hidden Linear has at most 1,024 features. Dropout acts in ``logits`` alone,
        and ``logits`` stops short of the Softmax. AvgPool2d is known whose window is the whole map: maps of another
        size are refused when they come.

        In eval mode more is known, whose steps are folded into parameters that are new, Dropouts being left out:
        BatchNorm1d and further Linears without activations between them, Conv2d of 1x1 and BatchNorm2d before an
        average pool.

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
            int(linear.in_features), int(linear.out_features), pool=pattern.pool, pool_size=pattern.pool_size,
            dropout=pattern.dropout, return_probs=return_probs, device="meta",  # its own parameters are dropped
        )  # fmt: skip
        del head.linear  # to come after the hidden layers
        if (hidden := pattern.hidden_stack()) is not None:
            head._modules["hidden"] = hidden
        head.linear = linear
        head.map_size, head._source_paths = pattern.map_size, pattern.paths
        head.rule = own_rule(rule, linear.weight.device)
        return head.train(module.training)

    @property
    def num_classes(self) -> int:
        """Number of classes, K."""
        return _size(self.linear, "out_features")

    @property
    def hidden(self) -> HiddenStack | None:
        """Layers before the last linear one; None if there are none, and then there will be none."""
        return self._modules.get("hidden")  # type: ignore[return-value]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse hidden layers for a head that has none: repeats do not look for them, since that takes time."""
        if name == "pool_size":
            value = check_pool(self.pool, value)
        if name != "hidden" or self.hidden is not None:
            super().__setattr__(name, value)
        elif value is not None:
            raise AttributeError("hidden: the head was made without hidden layers, wants a new one: hidden_features=64")

    @property
    def in_features(self) -> int | None:  # type: ignore[override]
        """Features after pool and flatten; None before a head that was made without a width has seen an input."""
        first = self._first_linear()
        return None if isinstance(first, nn.LazyLinear) else _size(first, "in_features")

    def _first_linear(self) -> nn.Linear:
        hidden = self.hidden
        return self.linear if hidden is None or hidden.linear is None else hidden.linear

    def hidden_layers(self) -> HiddenLayers:
        """Return the layers before the last one as kernels take them, with the very tensors."""
        hidden = self.hidden
        return NO_LAYERS if hidden is None else hidden.as_layers()

    def forward(self, x: Tensor) -> HeadOutput:
        """Answer for a batch in one launch; dropout does not act, in training mode either.

        A head whose layers are no plain ones (wrapped by an adapter, say, parametrized, quantised or with hooks)
        answers by its ``logits`` instead.
        """
        if torch.compiler.is_compiling() or type(x) is not Tensor:
            return self._call(x)
        return answer(self._repeats, self, x, self._call)

    def _call(self, x: Tensor) -> HeadOutput:
        """Answer by the operator, which checks everything and follows autograd, modes and transforms."""
        if isinstance(x, Tensor) and isinstance(self._first_linear(), nn.LazyLinear):
            self._take_width_in_forward(x)
        if self.why_not_launched() is not None:
            logits = self.logits(x) if overridden(self, FusedAuxHead) else self._last(self._read(x), drops=False)
            return self.rule.judge(logits, return_probs=self.return_probs)
        check_dense("x", x)
        check_map_size(x, self.map_size)
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        hidden = self.hidden_layers()
        read: torch.cuda.Event | None = None
        if not torch.compiler.is_compiling() and isinstance(x, Tensor):
            read = wait_for_write(self.rule, x)
        if _autocasts(x):  # as autocast does for the nn.Linear this replaces
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
            hidden = hidden.to(x.dtype)
        output = fused_head(
            x, weight, bias, pool=self.pool, pool_size=self.pool_size, criterion=self.rule.criterion,
            temperature=self.rule.temperature_tensor, threshold=self.rule.threshold_tensor,
            return_probs=self.return_probs, hidden=hidden,
        )  # fmt: skip
        if read is not None:
            read.record(torch.cuda.current_stream(x.device))
        return output

    def _take_width_in_forward(self, x: Tensor) -> None:
        weight = self._first_linear().weight
        if not _autocasts(x) and (x.dtype, x.device) != (weight.dtype, weight.device):
            raise ValueError(
                f"x: got {x.dtype} on {x.device}, wants {weight.dtype} on {weight.device}, as the head's parameters"
            )
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError("x: is the head's first, and within a transform of torch.func; wants one outside before")
        with torch.inference_mode(False), torch.no_grad():  # parameters made in inference mode could not train
            self.take_width_of(x.clone())

    def take_width_of(self, x: Tensor) -> None:
        """Give a head that was made without a width that of its first input; after an error it is without one again."""
        with lazy_after_errors(self._first_linear()):
            self.logits(x)

    def layers(self) -> list[tuple[str, nn.Module]]:
        """Name the layers with parameters, in the order in which they run."""
        hidden = self.hidden
        before = [] if hidden is None else [(f"hidden.{name}", layer) for name, layer in hidden.layers()]
        return [*before, ("linear", self.linear)]

    def parts(self) -> list[tuple[str, nn.Module]]:
        """Name the modules that ``logits`` calls, and a launch stands for."""
        return [*([] if self.hidden is None else [("hidden", self.hidden)]), *self.layers()]

    def why_not_launched(self) -> str | None:
        """Return what of the head a launch would not follow, a layer that is another one now, say; None if nothing."""
        for name, part in self.parts():
            kind = {"hidden": HiddenStack, "hidden.norm": nn.LayerNorm}.get(name, nn.Linear)
            if type(part) is not kind:
                return f"{name} is a {type(part).__name__}"
            if (reason := why_not_plain(part)) is not None:
                return f"{name} {reason}"
        return overridden(self, FusedAuxHead)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [N, K] in x's dtype, differentiably, before temperature and softmax."""
        return self.logits_of_features(self._read(x))

    def _read(self, x: Tensor) -> Tensor:
        check_dense("x", x)
        check_input(x, self.pool, self.pool_size)
        return self._pooled(x)

    def features(self, x: Tensor) -> Tensor:
        """Return what of a tap's output ``logits_of_features`` reads: [N, D], pooled, in the parameters' dtype."""
        return self._pooled(x).to(next(self.linear.parameters(), x).dtype)

    def _pooled(self, x: Tensor) -> Tensor:
        check_map_size(x, self.map_size)
        rectifies = self.hidden is not None and self.hidden.rectifies
        return pooled_features(F.relu(x) if rectifies else x, self.pool, self.pool_size)

    def logits_of_features(self, features: Tensor) -> Tensor:
        """Return the logits [N, K] for pooled features [N, D], differentiably."""
        return self._last(features, drops=True)

    def _last(self, features: Tensor, *, drops: bool) -> Tensor:
        hidden, dropout = self.hidden, self.dropout
        if hidden is None:
            return self.linear(F.dropout(features, dropout, drops and self.training))
        features = hidden(F.dropout(hidden.normed(features), dropout, drops and self.training))
        drops = drops and hidden.training and hidden.linear is not None
        return self.linear(F.dropout(features, hidden.dropout, drops))

    def launch_input(self, x: Tensor) -> Tensor:
        """Return what an exit launch reads for this head: the tap's output itself."""
        if self.map_size is not None:
            check_map_size(x, self.map_size)
        return x

    def answer(self, x: Tensor) -> HeadOutput:
        """Answer for what ``launch_input`` returned."""
        return self(x)

    def depends_on(self) -> Iterable[tuple[Mapping[str, Any], str]]:
        """Name the objects that a launch depends on, as keys of the dicts that hold them."""
        own = self._modules
        linear, rule, hidden = own["linear"], own["rule"], self.hidden
        assert isinstance(linear, nn.Module) and isinstance(rule, ExitRule)
        of_linear = [(linear._parameters, "weight"), (linear._parameters, "bias")]
        of_hidden = [] if hidden is None else [(own, "hidden"), *hidden.depends_on()]
        return [(own, "linear"), (own, "rule"), *of_linear, *of_hidden, *rule.depends_on()]

    def describe(self) -> str:
        """Say what it computes."""
        hidden = "" if self.hidden is None else f"{self.hidden.describe()}, "
        return f"pool {self.pool!r}, {hidden}{self.num_classes} classes"

    def fields(self) -> dict[str, Any]:
        """Return the arguments that make it again, for a checkpoint; ``ValueError`` if its layers are no plain ones."""
        if type(self) is not FusedAuxHead:
            return super().fields()
        if self.in_features is None:
            raise ValueError("does not know its width yet; call network.check_taps(example_input) before")
        if (why := self.why_not_launched()) is not None:
            raise ValueError(
                f"{why}, which files do not keep; merge adapters, remove parametrizations and hooks before"
            )
        fields: dict[str, Any] = {name: getattr(self, name) for name in ("in_features", "num_classes", "pool")}
        fields |= {"pool_size": list(self.pool_size), "bias": self.linear.bias is not None}
        fields |= {"dropout": self.dropout, "return_probs": self.return_probs}
        if self.map_size is not None:
            fields["map_size"] = list(self.map_size)
        if self.hidden is not None:
            fields["hidden"] = self.hidden.fields()
        return fields

    def check_on(self, tap: str, features: Tensor, *, autocasts: bool = False) -> None:
        """Check that its launch reads the output of its tap, of any width if it has none; see the base class."""
        try:
            width, _ = self.in_features, self.num_classes
            if width is not None and self.why_not_launched() is not None:
                return  # its layers run as they are
            if width is not None:
                self._check_parameters(features, autocasts=autocasts)
            check_map_size(features, self.map_size)
            found = check_input(features, self.pool, self.pool_size)
            check_countable(features, found)
        except ValueError as error:
            raise ValueError(f"heads[{tap!r}]: {error}") from None
        if width is not None and found != width:
            raise ValueError(
                f"heads[{tap!r}]: its linear layer takes {width} features, but the output {list(features.shape)} of "
                f"the tap has {found} with pool={self.pool!r} and pool_size={self.pool_size}"
            )

    def _check_parameters(self, features: Tensor, *, autocasts: bool) -> None:
        weight = self.linear.weight
        if weight.device != features.device or (weight.dtype != features.dtype and not autocasts):
            wants = f"{features.dtype} on {features.device}, as the output of the tap"
            raise ValueError(f"is {weight.dtype} on {weight.device}, wants {wants}")
        try:
            self._check_hidden()
        except TypeError as error:
            raise ValueError(f"{error}") from None

    def settle(self, found: HeadRun | None, features: Tensor, *, autocasts: bool) -> None:
        """Take the width of the output of its tap, if it was made without one."""
        if self.in_features is None:
            self.to(features.device, None if autocasts else features.dtype)
            with torch.no_grad():
                self.take_width_of(features)

    def _check_hidden(self) -> None:
        """Raise ``ValueError`` or ``TypeError`` unless the layers before the last one fit it and each other."""
        if self.hidden is not None:
            self.hidden.check(self._first_linear().in_features, self.linear)

    def as_exit_head(self) -> ExitHead:
        """Return the tensors and sizes that a launch for a whole network reads: the very ones, not copies."""
        linear, hidden = self.linear, self.hidden_layers()
        check_readable([("linear.weight", linear.weight), ("linear.bias", linear.bias), *hidden.tensors()])
        self._check_hidden()
        return ExitHead(
            linear.weight,
            linear.bias,
            self.rule.temperature_tensor,
            self.rule.threshold_tensor,
            self.pool,
            self.pool_size,
            self.rule.criterion,
            hidden,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Accept the parameters of a classifier whose layers have other names, as an ``nn.Sequential``'s have."""
        own = [name for name, layer in self.layers() if next(layer.parameters(), None) is not None]
        rename_layers(state_dict, prefix, own, [self._source_paths.get(name, name) for name in own])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Show what the linear layer below does not."""
        return f"pool={self.pool!r}, pool_size={self.pool_size}, dropout={self.dropout}"


def _size(linear: nn.Module, name: str) -> int:
    """Return a size of a linear layer, or of what wraps one."""
    found = getattr(linear, name, None)
    if not isinstance(found, SupportsIndex):  # an int of NumPy's, too
        raise ValueError(f"linear: is a {type(linear).__name__} without {name}, wants a layer that has it as nn.Linear")
    return found.__index__()


def _autocasts(x: Tensor) -> bool:
    return isinstance(x, Tensor) and x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
