"""Layers of a fused head: those before its last one, checks of parameters, a lazy width, names in a state_dict."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import ACTIVATIONS, HiddenLayers
from ...kernels.launch.check_arguments import head_dtypes, head_dtypes_in_words
from ...kernels.reference.hidden_layers import MOST_HIDDEN, check_hidden_layers
from ..basics.arguments import is_plain, tensor_in_words

#: Of an exit rule, which classifiers have not.
_OF_RULE = "rule._extra_state"


class HiddenStack(nn.Module):
    """A ReLU before a head's pool, and behind it a LayerNorm and a linear layer with its activation; any may be absent.

    The head applies both dropouts: its own between norm and linear layer, and ``dropout`` behind the activation.
    """

    norm: nn.LayerNorm | None
    linear: nn.Linear | None

    def __init__(
        self,
        *,
        rectifies: bool = False,
        norm: nn.LayerNorm | None = None,
        linear: nn.Linear | None = None,
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        """Hold layers, which are shared.

        Args:
            rectifies: whether a ReLU comes before the pool.
            norm: over all features of a sample.
            linear: reads them; of at most 1,024 outputs.
            activation: after ``linear``, a name in ``auxhead.kernels.ACTIVATIONS``.
            dropout: probability after the activation, in training.

        Raises:
            ValueError: an argument out of range.
        """
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {activation!r}, wants one of {list(ACTIVATIONS)}")
        if not (isinstance(dropout, (int, float)) and 0.0 <= dropout <= 1.0):
            raise ValueError(f"hidden_dropout: got {dropout!r}, wants a probability in [0, 1]")
        self.rectifies = rectifies
        self.register_module("norm", norm)  # as a module where it is None, too: repeats look there
        self.register_module("linear", linear)
        self.activation = activation
        self.dropout = dropout

    def normed(self, features: Tensor) -> Tensor:
        """Return pooled features [N, D] as the linear layer reads them, before the head's dropout."""
        return features if self.norm is None else self.norm(features)

    def forward(self, features: Tensor) -> Tensor:
        """Return the hidden features [N, H] of normed ones, differentiably, before dropout."""
        return features if self.linear is None else ACTIVATIONS[self.activation](self.linear(features))

    def as_layers(self) -> HiddenLayers:
        """Return the layers as kernels take them, with the very tensors."""
        norm, linear = self.norm, self.linear
        return HiddenLayers(
            rectifies=self.rectifies,
            eps=None if norm is None else norm.eps,
            norm_weight=None if norm is None else norm.weight,
            norm_bias=None if norm is None else norm.bias,
            weight=None if linear is None else linear.weight,
            bias=None if linear is None else linear.bias,
            activation=self.activation,
        )

    def check(self, in_features: int, last: nn.Linear) -> None:
        """Raise unless layers fit so many pooled features, each other and a head's last one, in dtype and device, too.

        Raises:
            ValueError, TypeError: as :func:`auxhead.kernels.fused_head`.
        """
        if self.norm is not None and self.norm.normalized_shape != (in_features,):
            got = list(self.norm.normalized_shape)
            raise ValueError(
                f"hidden.norm: got a LayerNorm over {got}, wants [{in_features}], the features of a sample"
            )
        made = check_hidden_layers(self.as_layers(), in_features, last.weight)
        if last.in_features != made:
            raise ValueError(
                f"linear: takes {last.in_features} features, wants {made}, as many as the layers before it make"
            )

    def layers(self) -> Iterable[tuple[str, nn.Module]]:
        """Name the layers that there are, in the order in which they run."""
        named = (("norm", self.norm), ("linear", self.linear))
        return [(name, layer) for name, layer in named if layer is not None]

    def depends_on(self) -> Iterable[tuple[Mapping[str, Any], str]]:
        """Name the objects that a launch depends on, as keys of the dicts that hold them."""
        own = vars(self)
        found: list[tuple[Mapping[str, Any], str]] = [(self._modules, "norm"), (self._modules, "linear")]
        found += [(own, "rectifies"), (own, "activation")]
        for name, layer in self.layers():
            found += [(layer._parameters, "weight"), (layer._parameters, "bias")]
            if name == "norm":
                found.append((vars(layer), "eps"))
        return found

    def fields(self) -> dict[str, Any]:
        """Return the facts that make layers of the same kind, for a checkpoint."""
        norm, linear = self.norm, self.linear
        parts = {} if norm is None else {"weight": norm.weight is not None, "bias": norm.bias is not None}
        return {
            "rectifies": self.rectifies,
            "norm": None if norm is None else {"eps": norm.eps, **parts},
            "features": None if linear is None else int(linear.out_features),
            "bias": linear is not None and linear.bias is not None,
            "activation": self.activation,
            "dropout": self.dropout,
        }

    def describe(self) -> str:
        """Name the layers, in the order in which they run."""
        parts = ["a ReLU before it"] * self.rectifies + ["a LayerNorm"] * (self.norm is not None)
        if self.linear is not None:
            parts.append(f"{self.linear.out_features} hidden features with {self.activation}")
        return ", ".join(parts)

    def extra_repr(self) -> str:
        """Show what the layers below do not."""
        return f"rectifies={self.rectifies}, activation={self.activation!r}, dropout={self.dropout}"


def make_hidden_stack(
    in_features: int | None,
    hidden_features: int | None,
    *,
    norm: bool,
    rectifies: bool,
    activation: str,
    hidden_bias: bool,
    hidden_dropout: float,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> HiddenStack | None:
    """Make fresh layers by the arguments of :class:`FusedAuxHead`; None if there are none."""
    for name, value in (("norm", norm), ("rectifies", rectifies), ("hidden_bias", hidden_bias)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: got {value!r}, wants a bool")
    if hidden_features is not None and (type(hidden_features) is not int or not 1 <= hidden_features <= MOST_HIDDEN):
        raise ValueError(f"hidden_features: got {hidden_features!r}, wants an int from 1 to {MOST_HIDDEN:,}, or None")
    if norm and in_features is None:
        raise ValueError("in_features: got None with norm=True, wants the number of features, which a norm has to know")
    linear: nn.Linear | None = None
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    if hidden_features is not None and in_features is None:
        linear = nn.LazyLinear(hidden_features, hidden_bias, **options)
    elif hidden_features is not None and in_features is not None:
        linear = nn.Linear(in_features, hidden_features, hidden_bias, **options)
    stack = HiddenStack(
        rectifies=rectifies,
        norm=nn.LayerNorm(in_features, **options) if norm and in_features is not None else None,
        linear=linear,
        activation=activation,
        dropout=hidden_dropout,
    )
    return stack if rectifies or norm or linear is not None else None


def check_map_size(x: Any, size: tuple[int, int] | None) -> None:
    """Raise ``ValueError`` for another map than the one that the window of an AvgPool2d is as large as."""
    if size is not None and isinstance(x, Tensor) and (x.ndim != 4 or x.shape[2:] != size):
        raise ValueError(
            f"x: got shape {list(x.shape)}, wants maps of {size[0]}x{size[1]}: the head was made of an AvgPool2d with "
            "this window, and stands for it there alone"
        )


def check_readable(parameters: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise ``ValueError`` for a parameter that is not what its memory says, or of a dtype that no head computes in."""
    for name, tensor in parameters:
        if tensor is None:
            continue
        if not is_plain(tensor) or tensor.is_neg():
            got = "a lazily negated one" if is_plain(tensor) else tensor_in_words(tensor)
            raise ValueError(f"{name}: got {got}, wants a plain tensor")
        if tensor.dtype not in head_dtypes(tensor.device):
            wants = head_dtypes_in_words(tensor.device)
            raise ValueError(f"{name}: got {tensor.dtype} on {tensor.device}, wants {wants}")


@contextmanager
def lazy_after_errors(linear: nn.Module) -> Iterator[None]:
    """Make an ``nn.LazyLinear`` that has not become an ``nn.Linear`` inside one without parameters again."""
    try:
        yield
    except BaseException:
        if isinstance(linear, nn.LazyLinear):
            # PyTorch makes one parameter after the other, and could not go on where there was memory for some.
            for parameter in linear.parameters():
                if not isinstance(parameter, nn.UninitializedParameter):
                    parameter.data = parameter.data.new_empty(0)
                    parameter.__class__ = nn.UninitializedParameter  # type: ignore[assignment]  # as PyTorch does
        raise


def rename_layers(state_dict: dict[str, Tensor], prefix: str, own: Sequence[str], sources: Sequence[str]) -> None:
    """Rename in place, unless the names are the head's own already, or nothing tells which layer is which.

    Args:
        state_dict: of a whole model.
        prefix: of the head's names in it.
        own: the head's names of its layers with parameters, in the order in which they run.
        sources: names of the same layers in the classifier that the head was made of; ``own`` if there was none.
    """
    its = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    if all(any(key == f"{name}.weight" or key.startswith(f"{name}.parametrizations.") for key in its) for name in own):
        return
    found: Sequence[str] = list(dict.fromkeys(key.rpartition(".")[0] for key in its if key != _OF_RULE))
    if all(any(key.startswith(f"{source}.") for key in its) for source in sources):
        found = sources  # there may be more than weight and bias, those of a parametrization
    if len(found) != len(own):
        return
    renamed: dict[str, Tensor] = {}
    for source, name in zip(found, own, strict=True):
        old = f"{prefix}{source}."
        for key in [key for key in state_dict if key.startswith(old)]:
            renamed[f"{prefix}{name}.{key[len(old) :]}"] = state_dict.pop(key)
    state_dict.update(renamed)
