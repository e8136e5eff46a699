"""``HiddenStack``: the layers of a head before its last linear one, which its launch runs with it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels import ACTIVATIONS, HiddenLayers
from ...kernels.reference.hidden_layers import MOST_HIDDEN, check_hidden_layers


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
        if linear is not None and not 1 <= linear.out_features <= MOST_HIDDEN:
            raise ValueError(f"hidden_features: got {linear.out_features!r}, wants an int from 1 to {MOST_HIDDEN:,}")
        self.rectifies = rectifies
        self.register_module("norm", norm)  # as a module where it is None, too: plans look there
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

    def holders(self) -> Iterable[tuple[Mapping[str, Any], str]]:
        """Name the objects that a launch depends on, as keys of the dicts that hold them."""
        own = vars(self)
        found: list[tuple[Mapping[str, Any], str]] = [(self._modules, "norm"), (self._modules, "linear")]
        found += [(own, "rectifies"), (own, "activation")]
        for name, layer in self.layers():
            found += [(layer._parameters, "weight"), (layer._parameters, "bias")]
            if name == "norm":
                found.append((vars(layer), "eps"))
        return found

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
