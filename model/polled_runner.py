"""The polled runner: one CUDA graph a segment, and a host that stops launching when all samples are answered."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels import ExitBuffers, ExitLaunch
from .capture import Capture, Graph, warm_up
from .exit_result import ExitResult
from .graph_runner import CapturedBatch, GraphRunner, listed
from .taps import listening

#: A graph holds at least this much of the trunk, in microseconds: in that time its first head runs, the host sees what
#: it wrote and launches the next graph, and the trunk does not wait (H200: 8 for a head, 8 for the host, 6 to start).
_LEAST_SEGMENT_US = 25.0


class _Segments(CapturedBatch):
    def __init__(
        self,
        x: Tensor,
        buffers: ExitBuffers,
        launches: Sequence[ExitLaunch],
        graphs: Sequence[Graph],
        description: str,
        open_samples: Tensor,
    ) -> None:
        super().__init__(x, buffers, launches, graphs, description)
        self.open_samples: Any = open_samples.numpy()  # the same memory, faster to read
        self.count_requests()

    def count_requests(self) -> None:
        """Take over from the device how many requests there were."""
        self.request = int(self.buffers.requests)


class PolledRunner(GraphRunner):
    """Stops the network by not launching the rest of it.

    The trunk is cut into graphs of some length at its taps; the heads up to a cut run beside the next graph, in one
    launch. Its last program writes how many samples stay open to pinned memory, where the host sees it without a call
    to CUDA. Once none is open the answer is returned, and the GPU finishes that graph, which nobody needs. Heads with
    little of the trunk after them run with the classifier.
    """

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """One for all batch sizes, whose graphs share memory."""
        return torch.cuda.Stream(self._device, priority=-1)

    @cached_property
    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def _capture(self, x: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        trunk, side = self._capture_streams.pair
        stops = self._stops(x, _LEAST_SEGMENT_US)
        starts = [0, *(stop + 1 for stop in stops)]
        open_samples = torch.zeros(len(stops), dtype=torch.int64, device="cpu").pin_memory()
        launches = [
            ExitLaunch(buffers, start, self._places[start : stop + 1], open_samples=open_samples[i : i + 1])
            for i, (start, stop) in enumerate(zip(starts, stops, strict=False))
        ]
        last_launch = ExitLaunch(buffers, starts[-1], self._places[starts[-1] :])

        def forward(capture: Capture | None) -> None:
            held: list[Tensor] = []

            def on_tap(place: int, features: Tensor) -> None:
                held.append(features)
                if place not in stops:
                    return
                i = stops.index(place)
                if i > 0:
                    trunk.wait_stream(side)
                if capture is not None:
                    capture.cut()
                side.wait_stream(trunk)
                with torch.cuda.stream(side):
                    launches[i](held[starts[i] :])

            with listening(self._trunk.module, self.network.taps, on_tap):
                final = self._trunk.module(x)
            if stops:
                trunk.wait_stream(side)
            last_launch([*held[starts[-1] :], final])

        warm_up(lambda: forward(None), trunk)
        capture = Capture(self._device, self._pool)
        with capture.capturing(self._trunk.module, trunk):
            forward(capture)
        description = f"{len(capture.graphs)} graphs, cut after {listed(stops, self.network.taps) or 'no tap'}."
        launches.append(last_launch)
        return _Segments(x, buffers, launches, capture.graphs, description, open_samples)

    def _answer(self, captured: CapturedBatch, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        assert isinstance(captured, _Segments)
        try:
            return self._answer_polling(captured, x, caller)
        except BaseException:  # an interrupt, say, before or after the request was counted on the device
            with suppress(RuntimeError):  # which would hide what has gone wrong
                self._stream.synchronize()
                captured.count_requests()
            raise

    def _answer_polling(self, captured: _Segments, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        stream = self._stream
        self._event.record(caller)
        stream.wait_event(self._event)
        torch.cuda.set_stream(stream)
        try:
            captured.fill(x)
        finally:
            torch.cuda.set_stream(caller)
        graphs = captured.graphs
        captured.request += 1
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

    def _wait(self) -> None:
        super()._wait()
        self._stream.synchronize()  # a segment that nobody needed may still run

    def _poll(self, captured: _Segments, stop: int) -> int:
        """Wait until the heads of a stop have written how many samples of this request stay open, and return it."""
        numbers, request = captured.open_samples, captured.request
        polls = 0
        while (number := int(numbers[stop])) >> 32 != request:
            polls += 1
            # a failed launch would be waited for in vain; the query raises what has gone wrong
            if polls % 10_000 == 0 and self._stream.query() and int(numbers[stop]) >> 32 != request:
                raise RuntimeError(f"the heads of stop {stop} have finished without saying how many samples stay open")
        return number & 0xFFFFFFFF
