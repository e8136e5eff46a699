"""Lower bound for mixed exits: every segment of the trunk runs for no more samples than are still open."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...kernels.cuda.lifetimes import MemoryPool
from ...model import Trunk
from ...model.basics.streams import stream_pair
from ...model.listening.taps import listening
from ...model.runners.program import StaticInput, capture_program
from ..measuring.eager_truth import Answer
from ..measuring.peers import PeerAnswer, bare, merged_answer


class SegmentGraphs:
    """A trunk without heads for one batch size, a CUDA graph for each segment; the classifier is in the last."""

    def __init__(self, trunk: Trunk, taps: Sequence[str], example: Tensor) -> None:
        """Capture for batches like the example.

        Raises:
            RuntimeError: the trunk cannot be captured.
        """
        static = StaticInput(example.contiguous(memory_format=trunk.memory_format))
        self._input = static.x
        self._held: list[Tensor] = []  # the maps that segments hand to the next one, which is not launched with them

        def forward(cut: Callable[[], None]) -> PeerAnswer:
            self._held = []

            def on_tap(_place: int, features: Tensor) -> None:
                self._held.append(features)
                cut()

            with listening(trunk.module, taps, on_tap, trunk.reading):
                return bare(trunk, taps, static.x)

        stream, memory = stream_pair(example.device).trunk, MemoryPool(example.device)
        with torch.no_grad():
            program = capture_program(forward, static, [], stream, memory, [trunk.module])
        self.graphs, self._answer = program.graphs, program.result

    def answer(self, x: Tensor) -> Answer:
        """Launch one segment after the other; the answer is valid until the next one."""
        self._input.copy_(x)
        for graph in self.graphs:
            graph.launch(torch.cuda.current_stream(x.device))
        return merged_answer(self._answer)


class SegmentsLowerBound:
    """The trunk's segments for a request, each at the smallest captured size that holds the open samples.

    A call launches these segments one after another, knowing beforehand how many samples of its input leave where. So
    it takes the time of the trunk alone and of starting its graphs: no heads, no gathering of open samples, no wait of
    the host for a decision, no copy of input or answer. It gives no answer either: a segment of fewer samples runs on
    maps of other inputs.
    """

    def __init__(
        self, trunk: Trunk, taps: Sequence[str], inputs: Sequence[Tensor], exits: Sequence[Tensor], sizes: Sequence[int]
    ) -> None:
        """Capture the sizes that are needed.

        Args:
            trunk: to run.
            taps: where it is cut.
            inputs: the batches [N, ...] that calls may be for.
            exits: for each of them, [N] int64, the exits of its samples; the number of taps is the classifier.
            sizes: batch sizes that may be captured; the largest is at least N.
        """
        chosen = [segment_sizes(exit_index, len(taps), sizes) for exit_index in exits]
        needed = sorted({size for of_input in chosen for size in of_input})
        self._captured = {size: SegmentGraphs(trunk, taps, inputs[0][:size]) for size in needed}
        self._graphs = {
            x.data_ptr(): [self._captured[size].graphs[index] for index, size in enumerate(of_input)]
            for x, of_input in zip(inputs, chosen, strict=True)
        }

    def __call__(self, x: Tensor) -> Tensor:
        """Launch the segments that one of the inputs needs; returns that input, for :meth:`answer`."""
        stream = torch.cuda.current_stream(x.device)
        for graph in self._graphs[x.data_ptr()]:
            graph.launch(stream)
        return x

    def answer(self, x: Tensor) -> Answer:
        """Run all segments at every captured size and return the classifier's answers, some rows from each size."""
        parts: list[Answer] = []
        done = 0
        for size, captured in self._captured.items():
            found = captured.answer(x[:size])
            parts.append(Answer(*(field[done:size] for field in found)))
            done = size
        return Answer(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def segment_sizes(exit_index: Tensor, taps: int, sizes: Sequence[int]) -> list[int]:
    """Return the smallest size that holds the samples of each segment, up to the last segment that any sample needs."""
    open_samples = [int((exit_index >= index).sum()) for index in range(taps + 1)]
    return [min(size for size in sizes if size >= samples) for samples in open_samples if samples]
