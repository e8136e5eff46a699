"""Captured programs: whatever is measured in a CUDA graph of its own is warmed up, captured and kept here."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ...model.basics.garbage import no_garbage_collection
from ...model.basics.streams import stream_pair

#: What a program returns: it lies in the graph's memory, and each replay writes it anew.
Answered = TypeVar("Answered")

#: Launches of a head in one graph, one after the other.
CHAIN = 20
#: Runs before a capture, in which nothing may be compiled and cuDNN may choose no algorithms.
_WARM_UP = 2


class OwnGraph(Generic[Answered]):
    """A program in a CUDA graph of its own; a call replays it on the current stream."""

    def __init__(
        self, program: Callable[[], Answered], stream: torch.cuda.Stream, warm_up: Callable[[], object] | None = None
    ) -> None:
        """Run ``warm_up`` on ``stream``, or the program itself, and capture what the program does there."""
        self._program = program  # the graph uses its memory
        self._graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                (warm_up or program)()
        torch.cuda.synchronize(stream.device)
        with torch.no_grad(), no_garbage_collection(), torch.cuda.graph(self._graph, stream=stream):
            self.answer = program()
            """What the program returned, after a replay."""

    def __call__(self) -> None:
        """Replay."""
        self._graph.replay()


def chain(launch: Callable[[], Answered], device: torch.device, times: int | None = None) -> OwnGraph[Answered]:
    """Capture what ``launch`` does on the current stream, ``CHAIN`` or so many times in a row; the last one answers."""

    def program() -> Answered:
        for _ in range((times or CHAIN) - 1):
            launch()
        return launch()

    return OwnGraph(program, stream_pair(device).side, warm_up=launch)


class CapturedFunction(Generic[Answered]):
    """A function of one tensor in a CUDA graph: copies its input in and replays for the answer."""

    def __init__(
        self,
        function: Callable[[Tensor], Answered],
        example: Tensor,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Warm up and capture for inputs like the example, in memory like its, on the trunk's or another stream.

        The example may have more channels than the inputs; see :meth:`Trunk.memory_for`.
        """
        self._input = example.clone(memory_format=torch.preserve_format)
        self._captured = OwnGraph(lambda: function(self._input), stream or stream_pair(example.device).trunk)

    def __call__(self, x: Tensor) -> Answered:
        """Answer for a batch like the example; the answer is valid until the next call."""
        into = self._input if x.shape == self._input.shape else self._input[:, : x.shape[1]]
        into.copy_(x)
        self._captured()
        return self._captured.answer
