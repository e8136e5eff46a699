"""HiddenLayers: what a head does between its pool and its last linear layer, with the activations it may have."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Activations by name, each as PyTorch defines it. To add one: a row here, the same in jit/hidden_layers.py.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "hardswish": F.hardswish,
}
#: Hidden features of a head, at most: the program that decides about a sample has all of them at once.
MOST_HIDDEN = 1024
#: Where a number of ``ACTIVATIONS`` is expected: there is no hidden layer.
NO_ACTIVATION = -1


class HiddenLayers(NamedTuple):
    """Layers of a head before its last one: a ReLU, a LayerNorm, and a linear layer with its activation.

    In this order, pool and flatten behind the ReLU; in ``HiddenLayers()`` all are absent. Tensors have dtype and device
    of the head's input; :func:`fused_head` checks them.
    """

    rectifies: bool = False
    """Whether there is a ReLU before the pool."""
    eps: float | None = None
    """Of the norm over all features, from 0; None: there is none."""
    norm_weight: Tensor | None = None
    """[features], or None."""
    norm_bias: Tensor | None = None
    """[features], or None."""
    weight: Tensor | None = None
    """Of the hidden linear layer, [H, features], of at most 1,024 rows; None: there is none."""
    bias: Tensor | None = None
    """[H], or None."""
    activation: str = "relu"
    """Behind the hidden linear layer, a name of ``ACTIVATIONS``."""

    def tensors(self) -> tuple[tuple[str, Tensor | None], ...]:
        """The parameters by their names in errors."""
        return (
            ("hidden.norm_weight", self.norm_weight),
            ("hidden.norm_bias", self.norm_bias),
            ("hidden.weight", self.weight),
            ("hidden.bias", self.bias),
        )

    @property
    def activation_number(self) -> int:
        """Position of the activation in ``ACTIVATIONS``, or ``NO_ACTIVATION``."""
        return NO_ACTIVATION if self.weight is None else number_of_activation(self.activation)

    def first_weight(self, weight: Tensor) -> Tensor:
        """Return the weight that reads the features: that of the hidden layer, or else of the last one, as given."""
        return weight if self.weight is None else self.weight

    def rows(self, classes: int) -> int:
        """Return how many outputs the linear layer has that reads the features, of a head of K ``classes``."""
        return classes if self.weight is None else self.weight.shape[0]

    def to(self, dtype: torch.dtype) -> "HiddenLayers":
        """Return the layers with parameters of that dtype."""
        return self.with_tensors([None if one is None else one.to(dtype) for _, one in self.tensors()])

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> "HiddenLayers":
        """Return the layers with other parameters, in the order of :meth:`tensors`."""
        norm_weight, norm_bias, weight, bias = tensors
        return self._replace(norm_weight=norm_weight, norm_bias=norm_bias, weight=weight, bias=bias)

    def apply(self, features: Tensor) -> Tensor:
        """Return what norm, linear layer and activation make of features [N, F], differentiably."""
        if self.eps is not None:
            features = F.layer_norm(features, features.shape[1:], self.norm_weight, self.norm_bias, self.eps)
        if self.weight is None:
            return features
        return ACTIVATIONS[self.activation](F.linear(features, self.weight, self.bias))


#: Of a head that has none.
NO_LAYERS = HiddenLayers()


def number_of_activation(activation: str) -> int:
    """Return the position of an activation in ``ACTIVATIONS``."""
    return list(ACTIVATIONS).index(activation)


def check_hidden_types(hidden: HiddenLayers) -> None:
    """Raise ``TypeError`` for a field of another type than declared; ``fused_head`` checks those that are tensors."""
    if not isinstance(hidden, HiddenLayers):
        raise TypeError(f"hidden: got {type(hidden).__name__}, wants a HiddenLayers or None")
    if not isinstance(hidden.rectifies, bool):
        raise TypeError(f"hidden.rectifies: got {type(hidden.rectifies).__name__}, wants a bool")
    if not (hidden.eps is None or isinstance(hidden.eps, float) or type(hidden.eps) is int and abs(hidden.eps) < 1e300):
        raise TypeError(f"hidden.eps: got {type(hidden.eps).__name__}, wants a float or None")
    if not isinstance(hidden.activation, str):
        raise TypeError(f"hidden.activation: got {type(hidden.activation).__name__}, wants one of {list(ACTIVATIONS)}")


def check_hidden_layers(hidden: HiddenLayers, features: int, x: Tensor) -> int:
    """Check the layers of a head whose pool makes so many features of ``x``; returns how many its last layer takes.

    Raises:
        ValueError, TypeError: a shape, device, value or dtype that does not fit.
    """
    if hidden.activation not in ACTIVATIONS:
        raise ValueError(f"hidden.activation: got {hidden.activation!r}, wants one of {list(ACTIVATIONS)}")
    if hidden.eps is not None and not 0.0 <= hidden.eps < float("inf"):
        raise ValueError(f"hidden.eps: got {hidden.eps!r}, wants None or a finite number of at least 0")
    weight = hidden.weight
    if hidden.eps is None and not (hidden.norm_weight is None and hidden.norm_bias is None):
        raise ValueError("hidden.eps: got None with parameters of a norm, wants its eps")
    if weight is None and hidden.bias is not None:
        raise ValueError("hidden.bias: got a tensor without a hidden.weight, wants None")
    for name, one in hidden.tensors()[:2]:
        if one is not None and list(one.shape) != [features]:
            raise ValueError(f"{name}: got shape {list(one.shape)}, wants [{features}], the features of a sample")
    if weight is not None:
        if weight.ndim != 2 or not 1 <= weight.shape[0] <= MOST_HIDDEN or weight.shape[1] != features:
            wants = f"[hidden features, at most {MOST_HIDDEN}, {features}]"
            raise ValueError(f"hidden.weight: got shape {list(weight.shape)}, wants {wants}")
        if hidden.bias is not None and hidden.bias.shape != weight.shape[:1]:
            raise ValueError(f"hidden.bias: got shape {list(hidden.bias.shape)}, wants [{weight.shape[0]}]")
    check_like(x, hidden.tensors())
    return features if weight is None else weight.shape[0]


def check_like(x: Tensor, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise ``TypeError`` for a named tensor of another dtype than x, ``ValueError`` for one on another device."""
    for name, one in tensors:
        if one is not None and one.dtype != x.dtype:
            raise TypeError(f"{name}: got {one.dtype}, wants {x.dtype}, the dtype of x")
        if one is not None and one.device != x.device:
            raise ValueError(f"{name}: got device {one.device}, wants {x.device}, the device of x")
