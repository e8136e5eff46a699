"""``PolledRunner``: a few CUDA graphs, which the host stops launching once all samples are answered."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import ExitBuffers, ExitLaunch
from ...kernels.cuda.lifetimes import MemoryPool, new_event
from ..answers.exit_result import ExitResult
from ..listening.taps import list_taps
from .capture import Graph
from .graph_runner import GraphRunner
from .program import CapturedBatch, HeadLaunches, StaticInput
from .segment_times import choose_stops

#: A graph holds at least this much of the trunk, in microseconds: in that time its first head runs, the host sees what
#: it wrote and launches the next graph, and the trunk does not wait (H200: 8 for a head, 8 for the host, 6 to start).
_LEAST_SEGMENT_US = 25.0
#: What a further graph takes, in microseconds, where the trunk goes on: of ResNet-18 seven took 66 (H100).
_STOP_US = 9.0


#: Requests are counted from 0 again after this one, as the upper half of an int64 holds their number.
_MOST_REQUESTS = (1 << 32) - 1


def stops_by_rule(segment_us: Sequence[float], done: Sequence[float] | None = None) -> list[int]:
    """Choose the taps, by index, after which a graph ends and the host asks whether to go on."""
    return choose_stops(segment_us, _LEAST_SEGMENT_US, _STOP_US, done, ahead=True)


class CapturedSegments(NamedTuple):
    """A network captured in graphs, one behind the other."""

    graphs: list[Graph]
    launches: list[ExitLaunch]
    open_samples: Tensor
    """[stops] int64 in pinned memory; see :class:`ExitLaunch`."""
    outputs: list[Tensor]
    """Outputs of each tap and, last, of the trunk, in memory of the graphs."""


class PolledBatch(CapturedBatch):
    """A network captured for one batch size in several graphs."""

    def __init__(
        self,
        static: StaticInput,
        buffers: ExitBuffers,
        segments: CapturedSegments,
        description: str,
        stops: Sequence[int],
    ) -> None:
        """Answer for a static batch in ``buffers``; graphs end at each of ``stops``, indices of taps."""
        super().__init__(static, buffers, segments.launches, segments.graphs, description)
        self.stops = stops
        self.open_samples: Any = segments.open_samples.numpy()  # the same memory, faster to read
        self.count_requests()

    def count_requests(self) -> None:
        """Read from the device how many requests there were; its number of 64 bits is told to the host as 32 bits."""
        self.request = int(self.buffers.requests) & _MOST_REQUESTS

    def next_request(self) -> None:
        """Count a request that is about to be launched."""
        self.request = (self.request + 1) & _MOST_REQUESTS
        if self.request & _MOST_REQUESTS >> 1 == 0:  # twice in a round of numbers
            # A stop that no request has reached since the last round would seem to have been reached by this round's.
            # What the last request may still write is told from those to come until the next time.
            self.open_samples[:] = 0 if self.request else -(1 << 63)  # a number half a round away

    def poll(self, stop: int, stream: torch.cuda.Stream) -> int:
        """Wait until the heads of a stop have written how many samples of this request stay open, and return it.

        ``stream`` is the one that their graph was launched on.
        """
        numbers, request = self.open_samples, self.request
        polls = 0
        while (number := int(numbers[stop])) >> 32 & _MOST_REQUESTS != request:
            polls += 1
            # a failed launch would be waited for in vain; the query raises what has gone wrong
            if polls % 10_000 == 0 and stream.query() and int(numbers[stop]) >> 32 & _MOST_REQUESTS != request:
                raise RuntimeError(f"the heads of stop {stop} have finished without saying how many samples stay open")
        return number & 0xFFFFFFFF


class PolledRunner(GraphRunner):
    """Stops the network by not launching the rest of it.

    The trunk is cut into graphs of some length at its taps; the heads up to a cut run beside the next graph, in one
    launch. Its last program writes how many samples stay open to pinned memory, where the host sees it without a call
    to CUDA. Once none is open the answer is returned, and the GPU finishes that graph, which nobody needs. Heads with
    little of the trunk after them run with the classifier. Where it is known where samples leave, cuts are those that
    pay.
    """

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One for all batch sizes, whose graphs share memory, and of nobody else, who might be capturing it."""
        return self._captures.streams.trunk

    @cached_property
    def _event(self) -> torch.cuda.Event:
        return new_event()

    def _capture(self, example: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        stops = stops_by_rule(self._segment_times(example), self._shares_done(len(example)))
        static = self._static(example)
        segments = self._capture_segments(static, buffers, stops, self._captures.memory)
        graphs = f"{len(segments.graphs)} graph{'s' * (len(segments.graphs) > 1)}"
        description = f"{graphs}, cut after {list_taps(stops, self.network.taps)}."
        return PolledBatch(static, buffers, segments, description, stops)

    def _capture_segments(
        self,
        static: StaticInput,
        buffers: ExitBuffers,
        stops: Sequence[int],
        memory: MemoryPool,
        gather: Callable[[int, Tensor], None] | None = None,
    ) -> CapturedSegments:
        """Capture the network for a batch, cut at some taps, with memory from a pool.

        The heads since the stop before run beside what follows the cut. With ``gather`` they run before the cut, and so
        does what ``gather`` launches, given the index and the output of the tap.
        """
        streams = self._captures.streams
        open_samples = torch.zeros(len(stops), dtype=torch.int64, device="cpu").pin_memory()
        launches = HeadLaunches(buffers, self._exits, self.network.exit_heads, stops, open_samples=open_samples)
        self._compile(static, launches)

        def forward(cut: Callable[[], None]) -> list[Tensor]:
            def in_line(stop: int, outputs: list[Tensor]) -> None:
                launches.launch(stop, outputs)
                assert gather is not None
                gather(stops[stop], outputs[-1])
                cut()

            def beside(stop: int, outputs: list[Tensor]) -> None:
                launches.launch_beside(stop, outputs, streams.side, cut)

            outputs = self._run_trunk(static.read, stops, beside if gather is None else in_line)
            if stops and gather is None:
                streams.trunk.wait_stream(streams.side)
            launches.launch(len(stops), outputs)
            return outputs

        program = self._capture_program(forward, static, memory)
        return CapturedSegments(program.graphs, launches.launches, open_samples, program.result)

    def _answer(self, captured: CapturedBatch, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        assert isinstance(captured, PolledBatch)
        try:
            answer = self._answer_polling(captured, x, caller)
            self._captures.unneeded.record(self._stream)
            return answer
        except BaseException:  # an interrupt, say, before or after the request was counted on the device
            with suppress(RuntimeError):  # an error would hide what has gone wrong
                self._stream.synchronize()
                for batch in self._captured.values():
                    assert isinstance(batch, PolledBatch)
                    batch.count_requests()
            raise

    def _begin(self, captured: PolledBatch, x: Tensor, caller: torch.cuda.Stream) -> torch.cuda.Stream:
        """Copy in the batch of a new request on the stream that its graphs run on, which is returned."""
        stream = self._stream
        self._event.record(caller)
        stream.wait_event(self._event)
        captured.fill(x, stream)
        captured.next_request()
        return stream

    def _answer_polling(self, captured: PolledBatch, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        graphs = captured.graphs
        if len(graphs) == 1:  # nobody is asked: another stream would only have to be waited for
            caller.wait_event(self._captures.unneeded)  # what a larger batch has left, in the same memory
            return super()._answer(captured, x, caller)
        stream = self._begin(captured, x, caller)
        for graph in graphs[:2]:
            graph.launch(stream)
        packed, answer = captured.empty_answer()
        for stop in range(len(graphs) - 1):  # its heads run in the graph after it
            if self._poll(captured, stop) == 0:
                break
            if stop + 2 < len(graphs):
                graphs[stop + 2].launch(stream)
        else:
            self._event.record(stream)
            caller.wait_event(self._event)
        packed.copy_(captured.buffers.packed_answer)
        return answer

    def _poll(self, captured: PolledBatch, stop: int) -> int:
        """Return how many samples stay open after the heads of a stop, once they have written it."""
        return captured.poll(stop, self._stream)
