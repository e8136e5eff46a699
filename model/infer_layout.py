"""``with_layout``: infers the layout of a tap's output where that is certain, and refuses where it is not."""

from dataclasses import replace

from torch import Tensor

from ..kernels import check_input
from .channel_evidence import ChannelEvidence
from .fused_aux_head import FusedAuxHead
from .reading import Extract

#: Layouts by the dimension of the channels, for maps and tokens.
_BY_CHANNELS = {4: {1: "NCHW", 3: "NHWC"}, 3: {2: "NTD", 1: "NCL"}}


def with_layout(tap: str, extract: Extract, features: Tensor, head: FusedAuxHead, evidence: ChannelEvidence) -> Extract:
    """Return an extract with the layout of its tensor, which the dry run has made.

    Heads with pool="none" read elements in the order in which they are, and pool="first" is for tokens alone. A width
    that the head has already and that one layout alone has is as certain as what operators take for channels.

    Raises:
        ValueError: nothing tells the layout, or operators disagree; says what to write.
    """
    if extract.layout is not None or features.ndim not in _BY_CHANNELS or head.pool == "none":
        return extract
    layouts = _BY_CHANNELS[features.ndim]
    if features.ndim == 3 and head.pool == "first":
        return replace(extract, layout="NTD")
    dims = evidence.dims_of(features)
    if len(dims) == 1 and (layout := layouts.get(next(iter(dims)))) is not None:
        return replace(extract, layout=layout)
    fitting = [layout for layout in layouts.values() if _fits(head, Extract(layout=layout).view(features))]
    if not dims and len(fitting) == 1:
        return replace(extract, layout=fitting[0])
    why = "operators that read it disagree" if dims else "no operator that makes or reads it tells"
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
