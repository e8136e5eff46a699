"""HeadOutput: probs, label, confidence and exit of one head for a batch."""

from typing import NamedTuple

from torch import Tensor


class HeadOutput(NamedTuple):
    """The answer of one head for N samples and K classes, all on the device of the head's input."""

    probs: Tensor | None
    """[N, K] float32: softmax(logits / temperature); None where it was not asked for."""
    label: Tensor
    """[N] int64: the class of the largest logit, the first of equals."""
    confidence: Tensor
    """[N] float32: for ``max_prob`` the largest probability; NaN for a sample whose logits are not finite."""
    exit: Tensor
    """[N] bool: confidence > threshold, strictly."""
