"""AnswerLayout: where the parts of a packed answer lie, to view one of them without the others."""

from typing import NamedTuple

import torch
from torch import Tensor

from .exit_launch import ExitBuffers


class _Part(NamedTuple):
    start: int
    """In bytes."""
    row: int
    """Bytes of a sample."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of a sample."""


class AnswerLayout:
    """The parts of ``ExitBuffers.packed_answer`` and of copies of it; see :meth:`ExitBuffers.answer`."""

    def __init__(self, buffers: ExitBuffers) -> None:
        """Find out where the parts lie."""
        packed = buffers.packed_answer
        self._parts = [
            None
            if part is None
            else _Part(part.data_ptr() - packed.data_ptr(), part[0].nbytes, part.dtype, tuple(part.shape[1:]))
            for part in buffers.answer(packed)
        ]

    def view(self, index: int, packed: Tensor, samples: int) -> Tensor | None:
        """View a part for the first samples, of the shape and dtype that it has there.

        The index is 0 for the label [N], 1 for the exit [N], 2 for the confidence [N], 3 for the probabilities [N, K],
        which is None where there are none.
        """
        part = self._parts[index]
        if part is None:
            return None
        view = packed[part.start : part.start + samples * part.row].view(part.dtype)
        return view.view(samples, *part.shape) if part.shape else view
