"""``CapturedBatch``: a network captured for one batch size, with its graphs, static input and answer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import ExitBuffers, ExitLaunch
from ...kernels.answer_layout import AnswerLayout
from ...kernels.lifetimes import keep_in_children
from ..exit_result import ExitResult
from .capture import Graph, copy_memory


class StaticInput:
    """A batch at the address that graphs read, and the example that it holds while they are made."""

    def __init__(self, example: Tensor) -> None:
        """Copy the example, which must not change."""
        self.example = example
        self.x = example.clone(memory_format=torch.preserve_format)
        self._version = self.x._version
        self.changes = False
        """True if the backbone changes it in place."""

    def refill(self) -> None:
        """Copy the example again: a backbone may change its input in place."""
        self.x.copy_(self.example)
        self._version = self.x._version

    def look_for_changes(self) -> None:
        """Look after a run for writes, of the values that there were too, and compare with the example.

        Other batches may be changed where the example is not; and what kernels of the user's write counts no version.
        """
        self.changes |= self.x._version != self._version or not torch.equal(self.x, self.example)


class CapturedBatch:
    """A network captured for one batch size: takes a batch in and hands copies of the answer out."""

    def __init__(
        self,
        static: StaticInput,
        buffers: ExitBuffers,
        launches: Sequence[ExitLaunch],
        graphs: Sequence[Graph],
        description: str,
    ) -> None:
        """Answer for a static batch in ``buffers``; the graphs use the memory of ``launches``."""
        self.description = description
        self.x = static.x
        # What the padding of a batch holds: where each run changes it, an index would soon be out of range.
        self._padding = static.example if static.changes else None
        self.buffers = buffers
        self.graphs = graphs
        self._launches = launches
        self._valid = len(static.x)
        self._layout = AnswerLayout(buffers)
        self._into = static.x

    def fill(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy in a batch on a stream; it may be smaller than the captured one."""
        n = x.shape[0]
        if self._valid != n:
            self._valid = 0  # until all is done: an interrupt leaves nothing that looks right
            self._into = self.x[:n]
            with torch.cuda.stream(stream):
                self.buffers.valid.fill_(n)
            self._valid = n
        into = self._into
        if type(x) is Tensor and x.is_cuda and x.stride() == into.stride() and not x.is_neg() and not x.is_conj():
            # What copy_ does in the end, at half of its time for the host, for which the device is waiting.
            copy_memory(into.data_ptr(), x.data_ptr(), into.nbytes, stream.cuda_stream)
        else:
            if x.is_cpu and x.is_pinned():
                keep_in_children(x)
            with torch.cuda.stream(stream):
                into.copy_(x, non_blocking=True)
        if self._padding is not None and n < len(self.x):
            with torch.cuda.stream(stream):
                self.x[n:].copy_(self._padding[n:])

    def copied_answer(self) -> ExitResult:
        """Copy the answer out on the current stream."""
        return ExitResult.viewing(self.buffers.packed_answer.clone(), self._layout, self._valid)

    def empty_answer(self) -> tuple[Tensor, ExitResult]:
        """Allocate the memory of an answer: what ``packed_answer`` is copied to, and the result that views it."""
        packed = torch.empty_like(self.buffers.packed_answer)
        return packed, ExitResult.viewing(packed, self._layout, self._valid)
