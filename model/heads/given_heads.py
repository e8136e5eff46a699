"""Modules that users give for heads, and the heads of ours that they become."""

from collections.abc import Mapping

from torch import Tensor, nn

from ..basics.arguments import kind_of
from ..listening.hooks import overridden
from .fused_aux_head import FusedAuxHead
from .head import AuxHead
from .module_head import ModuleHead


def check_distinct(heads: Mapping[str, nn.Module]) -> None:
    """Raise ``ValueError`` if a head is that of two taps."""
    first: dict[nn.Module, str] = {}
    for tap, head in heads.items():
        if first.setdefault(head, tap) != tap:
            raise ValueError(f"heads[{tap!r}]: is that of {first[head]!r}, wants one with a rule of its own")


def as_head(tap: str, head: nn.Module) -> AuxHead:
    """Return the head that a module becomes; ``ValueError`` or ``TypeError`` for what can be none."""
    if isinstance(head, AuxHead):
        if (reason := overridden(head, head.kind())) is not None:
            raise ValueError(
                f"heads[{tap!r}]: is a {type(head).__name__} that {reason}, which launches or training would pass "
                f"over; wants a plain {head.kind().__name__}, or ModuleHead(module) of a module that makes logits"
            )
        return head
    if not isinstance(head, nn.Module):
        raise TypeError(f"heads[{tap!r}]: got {kind_of(head)}, wants a FusedAuxHead or another nn.Module")
    try:
        return FusedAuxHead.from_module(head)
    except ValueError as error:
        as_it_is = ModuleHead(head)
        own = type(head) is nn.Identity  # as errors advise for exits whose code is not to be touched
        as_it_is.why_not_fused = "the backbone makes its logits" if own else str(error).removeprefix("module: ")
        return as_it_is


def unless_of_other_maps(head: AuxHead, module: nn.Module | None, features: Tensor) -> AuxHead:
    """Return a head, or the module that it was made of where that pools by a window that is not the whole map."""
    if module is None or head.map_size is None or features.shape[2:] == head.map_size:
        return head
    height, width = head.map_size
    as_it_is = ModuleHead(module, return_probs=head.return_probs).to(next(head.parameters()).device)
    as_it_is.rule = head.rule
    as_it_is.why_not_fused = f"its AvgPool2d has windows of {height}x{width} on the output {list(features.shape)}"
    return as_it_is.train(head.training)
