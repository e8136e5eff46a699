"""The polled runner: one CUDA graph a segment, and a host that stops launching when all samples are answered."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels import ExitBuffers, ExitLaunch
from .capture import Capture, Graph, warm_up
from .exit_result import ExitResult
from .graph_runner import CapturedBatch, GraphRunner
from .taps import listening

if TYPE_CHECKING:
    from .early_exit_network import EarlyExitNetwork

#: What the host writes before a request where the heads write how many samples stay open.
_UNKNOWN = -1


class _Segments(CapturedBatch):
    def __init__(
        self,
        x: Tensor,
        buffers: ExitBuffers,
        launches: Sequence[ExitLaunch],
        graphs: Sequence[Graph],
        open_samples: Tensor,
    ) -> None:
        super().__init__(x, buffers, launches, graphs)
        self._open_samples = open_samples
        self.open_samples: Any = open_samples.numpy()  # the same memory, faster to read


class PolledRunner(GraphRunner):
    """Stops the network by not launching the rest of it.

    Graph k holds segment k of the trunk and, beside it, head k - 1. The last program of a head writes how many samples
    stay open to pinned memory, where the host sees it without a call to CUDA while the segment still runs. Once none is
    open the answer is returned, and the GPU finishes at most one segment of work that nobody needs.
    """

    def __init__(
        self,
        network: "EarlyExitNetwork",
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str = "as_is",
    ) -> None:
        """Capture ``network``; see :class:`GraphRunner`."""
        super().__init__(network, example_input, batch_sizes=batch_sizes, trunk=trunk)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._event = torch.cuda.Event()

    def _capture(self, x: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        trunk, side = self._capture_streams.levels(1)[0]
        open_samples = torch.full((len(self._heads),), _UNKNOWN, dtype=torch.int32, device="cpu").pin_memory()
        launches = [
            ExitLaunch(buffers, place, [head], open_samples=open_samples[place : place + 1])
            for place, head in enumerate(self._heads)
        ]
        last_launch = ExitLaunch(buffers, len(self._heads), self._places[-1:])

        def forward(capture: Capture | None) -> None:
            held: list[Tensor] = []

            def on_tap(place: int, features: Tensor) -> None:
                held.append(features)
                if place > 0:
                    trunk.wait_stream(side)  # the head before
                if capture is not None:
                    capture.cut()
                side.wait_stream(trunk)
                with torch.cuda.stream(side):
                    launches[place]([features])

            with listening(self._trunk.module, self.network.taps, on_tap):
                final = self._trunk.module(x)
            trunk.wait_stream(side)
            last_launch([final])

        warm_up(lambda: forward(None), trunk)
        capture = Capture(self._device, self._pool)
        with capture.capturing(self._trunk.module, trunk):
            forward(capture)
        return _Segments(x, buffers, [*launches, last_launch], capture.graphs, open_samples)

    def _answer(self, captured: CapturedBatch, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        assert isinstance(captured, _Segments)
        try:
            return self._answer_polling(captured, x, caller)
        except BaseException:  # an interrupt, say: heads that still run would write into the next request's numbers
            with suppress(RuntimeError):  # which would hide what has gone wrong
                self._stream.synchronize()
            raise

    def _answer_polling(self, captured: _Segments, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        stream = self._stream
        self._event.record(caller)
        stream.wait_event(self._event)
        captured.open_samples[:] = _UNKNOWN
        torch.cuda.set_stream(stream)
        try:
            captured.fill(x)
        finally:
            torch.cuda.set_stream(caller)
        graphs = captured.graphs
        graphs[0].launch(stream)
        graphs[1].launch(stream)
        packed, answer = captured.empty_answer()
        for place in range(len(graphs) - 1):
            if self._poll(captured, place) == 0:
                break
            if place + 2 < len(graphs):
                graphs[place + 2].launch(stream)
        else:
            self._event.record(stream)
            caller.wait_event(self._event)
        packed.copy_(captured.buffers.packed_answer)
        return answer

    def _wait(self) -> None:
        super()._wait()
        self._stream.synchronize()  # a segment that nobody needed may still run

    def _poll(self, captured: _Segments, place: int) -> int:
        """Wait until a head has written how many samples stay open, and return it."""
        flags = captured.open_samples
        polls = 0
        while (count := flags[place]) == _UNKNOWN:
            polls += 1
            # a failed launch would be waited for in vain; the query raises what has gone wrong
            if polls % 10_000 == 0 and self._stream.query() and flags[place] == _UNKNOWN:
                raise RuntimeError(f"head {place} has finished without saying how many samples stay open")
        return int(count)
