"""HeadOutput: probs, label, confidence and exit of one head for a batch."""

from typing import NamedTuple

from torch import Tensor
from torch.utils import _pytree


class HeadOutput(NamedTuple):
    """The answer of one head for N samples, on the device of its input; :func:`fused_head` documents the fields."""

    probs: Tensor | None
    label: Tensor
    confidence: Tensor
    exit: Tensor


# torch.export.save and AOTInductor refuse a NamedTuple without a name of its own
_pytree._register_namedtuple(HeadOutput, serialized_type_name="auxhead.kernels.HeadOutput")
