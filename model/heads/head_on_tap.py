"""Fused heads and what their taps return: checks, layouts that are inferred, and heads that are not fused after all."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...kernels import check_input
from ...kernels.launch.head_arguments import check_countable
from ..listening.hooks import has_hooks, overridden
from ..listening.reading import BY_CHANNELS, Extract
from .fused_aux_head import FusedAuxHead
from .head_checks import check_map_size
from .module_head import AuxHead, ModuleHead


def check_head_on_tap(tap: str, head: FusedAuxHead, features: Tensor, *, autocasts: bool) -> None:
    """Raise ``ValueError`` unless a head that is launched can read the output of its tap, of any width if it has none.

    Under autocast a head may have another dtype.
    """
    try:
        width, _ = head.in_features, head.num_classes
        if width is not None and head.why_not_launched() is not None:
            return  # its layers run as they are
        if width is not None:
            _check_parameters(head, features, autocasts=autocasts)
        check_map_size(features, head.map_size)
        found = check_input(features, head.pool, head.pool_size)
        check_countable(features, found)
    except ValueError as error:
        raise ValueError(f"heads[{tap!r}]: {error}") from None
    if width is not None and found != width:
        raise ValueError(
            f"heads[{tap!r}]: its linear layer takes {width} features, but the output {list(features.shape)} of the "
            f"tap has {found} with pool={head.pool!r} and pool_size={head.pool_size}"
        )


def _check_parameters(head: FusedAuxHead, features: Tensor, *, autocasts: bool) -> None:
    weight = head.linear.weight
    if weight.device != features.device or (weight.dtype != features.dtype and not autocasts):
        wants = f"{features.dtype} on {features.device}, as the output of the tap"
        raise ValueError(f"is {weight.dtype} on {weight.device}, wants {wants}")
    try:
        head.check_hidden()
    except TypeError as error:
        raise ValueError(f"{error}") from None


def check_head_beside_tap(tap: str, head: AuxHead, features: Tensor) -> None:
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
        why = overridden(head, FusedAuxHead if isinstance(head, FusedAuxHead) else ModuleHead)
        if (why := "carries hooks" if why is None and has_hooks(head) else why) is not None:
            raise ValueError(
                f"heads[{tap!r}]: {why}, which logits, training and calibration would pass over; wants that on "
                "its layers, where its answers follow, too"
            )


def unless_of_other_maps(head: AuxHead, module: nn.Module | None, features: Tensor) -> AuxHead:
    """Return a head, or the module that it was made of where that pools by a window that is not the whole map.

    Args:
        head: of a network.
        module: what it was made of, if it reads maps of one size alone.
        features: the output of the tap.
    """
    if module is None or isinstance(head, ModuleHead) or head.map_size is None or features.shape[2:] == head.map_size:
        return head
    height, width = head.map_size
    as_it_is = ModuleHead(module, return_probs=head.return_probs).to(head.linear.weight.device)
    as_it_is.rule = head.rule
    as_it_is.why_not_fused = f"its AvgPool2d has windows of {height}x{width} on the output {list(features.shape)}"
    return as_it_is.train(head.training)


def with_layout(tap: str, extract: Extract, features: Tensor, head: FusedAuxHead, channels: set[int]) -> Extract:
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


def _fits(head: FusedAuxHead, features: Tensor) -> bool:
    if head.in_features is None:
        return False
    try:
        return check_input(features, head.pool, head.pool_size) == head.in_features
    except ValueError:
        return False
