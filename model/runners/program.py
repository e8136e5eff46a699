"""``capture_program``, the one way to capture, for graph runners and pipelines; ``CapturedBatch``.

A forward becomes graphs that read a static input. A captured batch takes requests in and hands answers out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ...kernels import ExitBuffers, ExitHead, ExitLaunch
from ...kernels.cuda.lifetimes import MemoryPool, keep_in_children
from ..answers.exit_result import ExitResult
from ..basics.streams import each_once, on_stream
from ..heads.head import AuxHead
from .capture import Capture, Graph, copy_memory, warm_up
from .captured_network import Addresses

_T = TypeVar("_T")


class StaticInput:
    """A batch at the address that graphs read, and the example that it holds while they are made."""

    def __init__(self, example: Tensor, read: Tensor | None = None) -> None:
        """Copy the example, which must not change; or take a copy in memory that a trunk reads sooner."""
        self.example = example
        self.read = example.clone(memory_format=torch.preserve_format) if read is None else read
        """What the graphs read: further channels than the batch has are zeros, which nobody writes."""
        self.x = self.read if self.read.shape == example.shape else self.read[:, : example.shape[1]]
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


@dataclass(frozen=True)
class CapturedProgram(Generic[_T]):
    """What a forward was captured as."""

    graphs: list[Graph]
    """In the order of the cuts."""
    result: _T
    """What the captured forward returned, in memory of the graphs."""
    resizable: Addresses
    """Memory that was read and that a layer may resize, for :class:`CapturedNetwork`."""


def capture_program(
    forward: Callable[[Callable[[], None]], _T],
    static: StaticInput | None,
    inputs: Sequence[Tensor],
    stream: torch.cuda.Stream,
    memory: MemoryPool,
    modules: Sequence[nn.Module],
) -> CapturedProgram[_T]:
    """Warm up a forward, capture it, and keep what it reads: the one way to capture, for whatever runs from graphs.

    Args:
        forward: is given a function that ends one graph and begins the next.
        static: the input, which it may change in place and which is then filled anew; None if it is not.
        inputs: tensors that it reads and that stay where they are.
        stream: to capture on.
        memory: of the graphs.
        modules: that it runs, the one that errors name layers of first.
    """
    warm_up(lambda: forward(lambda: None), static.refill if static is not None else lambda: None, stream)
    if static is not None:
        static.look_for_changes()
    capture = Capture(stream.device, memory)
    with capture.capturing(stream, *modules):
        result = forward(capture.cut)
    return CapturedProgram(capture.graphs, result, capture.reads.resizable(inputs) if capture.reads is not None else {})


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
        self._layout = buffers.layout
        self._into = static.x
        self._is_whole = static.x is static.read
        self._staged: Tensor | None = None

    @property
    def by_library(self) -> list[int]:
        """Indices of heads that a library multiplies, before a launch that decides."""
        return [index for launch in self._launches for index in launch.by_library]

    @property
    def packed(self) -> list[int]:
        """Indices of heads whose features are packed by a launch before the one that decides."""
        return [index for launch in self._launches for index in launch.packed]

    def fill(self, x: Tensor, stream: torch.cuda.Stream) -> None:
        """Copy in a batch on a stream; it may be smaller than the captured one."""
        n = x.shape[0]
        if self._valid != n:
            self._valid = 0  # until all is done: an interrupt leaves nothing that looks right
            self._into = self.x[:n]
            with on_stream(stream):
                self.buffers.valid.fill_(n)
            self._valid = n
        into = self._into
        if not self._is_whole and x.is_cpu:  # which PyTorch copies to strided memory by way of the host's
            x = self._on_device(x, stream)
        if (
            self._is_whole
            and type(x) is Tensor
            and x.is_cuda
            and x.stride() == into.stride()
            and not x.is_neg()
            and not x.is_conj()
        ):
            # What copy_ does in the end, at half of its time for the host, for which the device is waiting.
            copy_memory(into.data_ptr(), x.data_ptr(), into.nbytes, stream.cuda_stream)
        else:
            if x.is_cpu and x.is_pinned():
                keep_in_children(x)
            with on_stream(stream):
                into.copy_(x, non_blocking=True)
        if self._padding is not None and n < len(self.x):
            with on_stream(stream):
                self.x[n:].copy_(self._padding[n:])

    def _on_device(self, x: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """Copy a batch from the host as it is, to memory that is there from the first such batch on."""
        if x.is_pinned():
            keep_in_children(x)
        with on_stream(stream):
            if self._staged is None:
                self._staged = torch.empty_like(self.x, memory_format=torch.channels_last)
            return self._staged[: len(x)].copy_(x, non_blocking=True)

    def copied_answer(self) -> ExitResult:
        """Copy the answer out on the current stream."""
        return ExitResult.viewing(self.buffers.packed_answer.clone(), self._layout, self._valid)

    def empty_answer(self) -> tuple[Tensor, ExitResult]:
        """Allocate the memory of an answer: what ``packed_answer`` is copied to, and the result that views it."""
        packed = torch.empty_like(self.buffers.packed_answer)
        return packed, ExitResult.viewing(packed, self._layout, self._valid)


class HeadLaunches:
    """At each of some taps one launch for all heads since the stop before; at the end one for the other exits."""

    def __init__(
        self,
        buffers: ExitBuffers,
        exits: Sequence[ExitHead | None],
        heads: Sequence[AuxHead],
        stops: Sequence[int],
        *,
        open_samples: Tensor | None = None,
        conditions: Tensor | None = None,
    ) -> None:
        """Prepare the launches of all ``exits``: of the heads, and last the classifier, None if its logits are given.

        The stops are indices of taps, ascending. For ``open_samples`` ([stops] int64 in pinned memory) and
        ``conditions`` ([stops] int64) see :class:`ExitLaunch`.
        """
        told = [] if open_samples is None else [*open_samples[:, None]]
        conditional = [] if conditions is None else [*conditions[:, None]]
        self._heads = heads
        starts = [0, *(stop + 1 for stop in stops)]
        self._exits_of = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(exits)], strict=True)]
        self.launches = [
            ExitLaunch(buffers, part.start, exits[part], open_samples=tells, condition=condition)
            for part, tells, condition in zip_longest(self._exits_of, told, conditional)
        ]
        """Launches in the order of the stops; the last one has the classifier."""

    def launch(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Launch one of them on the current stream, given the outputs of all taps so far and, last, of the trunk.

        Modules of heads that are not fused run before it, on this stream.
        """
        self.launches[index](self._inputs(index, outputs))

    def _inputs(self, index: int, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return what a launch reads of the outputs of all taps so far."""
        part = self._exits_of[index]
        outputs = outputs[part]
        reads = [head.launch_input(x).resolve_neg() for head, x in zip(self._heads[part], outputs, strict=False)]
        return [*reads, *outputs[len(reads) :]]

    def compile(self, outputs: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        """Launch all of them once on a stream, given the outputs of all taps and of the trunk; see ``each_once``."""
        each_once([partial(one, self._inputs(index, outputs)) for index, one in enumerate(self.launches)], stream)

    def launch_beside(
        self, index: int, outputs: Sequence[Tensor], side: torch.cuda.Stream, cut: Callable[[], None] | None = None
    ) -> None:
        """Launch one of them on a side stream, beside what follows on the current one, the trunk's.

        ``cut`` ends the graph before it, with all that was launched beside that; without it there is one graph.
        """
        trunk = torch.cuda.current_stream(side.device)
        if cut is not None:
            if index > 0:
                trunk.wait_stream(side)
            cut()
        side.wait_stream(trunk)
        with torch.cuda.stream(side):
            self.launch(index, outputs)
