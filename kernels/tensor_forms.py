"""TensorForms: the form that tensors had (type, dtype, device, shape, strides), to compare others with at one call."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # in PyTorch's core; Dynamo itself is not imported


class TensorForms:
    """Forms of some tensors, no two of which are the same object.

    What ``torch.compile`` guards its code by: one call of C for all tensors, where shapes and strides of each one by
    one take several times that, a microsecond for eight heads' parameters where it was six.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Remember the tensors' forms, and none of the tensors."""
        inference = torch.is_inference_mode_enabled()  # a guard holds for the mode that it was made in
        self._fit = {}
        for mode in (inference, not inference):
            with nullcontext() if mode is inference else torch.inference_mode(mode):
                self._fit[mode] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def are_those_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether as many tensors have these forms, and mean the same by their memory (lazily negated or not).

        Neither modes, transforms nor autocast may be active but those that were.
        """
        return bool(self._fit[torch.is_inference_mode_enabled()](*tensors))
