"""``Wire``: the form in which stages hand on: what was said of samples, and behind it an activation, as bytes.

One message a micro-batch instead of two: each takes the hosts some hundred microseconds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runners.capture import copy_memory

#: Where an activation begins is a multiple of so many bytes, as kernels read memory best.
_ALIGNMENT = 256


class Wire:
    """What one stage hands on to the next, or the last one to the first, of a micro-batch."""

    def __init__(self, said: Tensor, activation: Tensor | None, memory_format: torch.memory_format) -> None:
        """Send tensors like these, on any device; the activation, if there is one, lies dense in a memory format."""
        self._like = [said.to("meta")]
        if activation is not None:
            self._like.append(activation.to("meta").contiguous(memory_format=memory_format))
        self._format = memory_format
        self._starts = [0, -(-said.nbytes // _ALIGNMENT) * _ALIGNMENT]
        self._bytes = self._starts[len(self._like) - 1] + self._like[-1].nbytes

    def empty(self, device: torch.device | str) -> Tensor:
        """Allocate what is sent."""
        return torch.empty(self._bytes, dtype=torch.uint8, device=device)

    def views(self, packed: Tensor) -> list[Tensor]:
        """View what was said, and the activation, in what is sent."""
        parts = [packed[start : start + like.nbytes] for start, like in zip(self._starts, self._like, strict=False)]
        return [part.view(x.dtype).as_strided(x.shape, x.stride()) for part, x in zip(parts, self._like, strict=True)]

    def fill(self, packed: Tensor, given: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        """Copy into what is sent, on a stream of its device: as to ``views``, in less time of the host."""
        for start, each in zip(self._starts, given, strict=False):
            copy_memory(packed.data_ptr() + start, each.data_ptr(), each.nbytes, stream.cuda_stream)

    def said_in(self, sent: Sequence[Tensor]) -> Tensor:
        """Return a copy of what was said of the samples of several micro-batches, one after another."""
        (like, *_) = self._like
        return torch.stack([packed[: like.nbytes] for packed in sent]).view(like.dtype).view(-1, like.shape[1])

    def dense(self, activation: Tensor) -> Tensor:
        """Return an activation as it lies in what is sent."""
        return activation.resolve_conj().resolve_neg().contiguous(memory_format=self._format)
