"""The overlapped runner: the whole network in one CUDA graph, heads beside the trunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import ExitBuffers, ExitLaunch
from .capture import Capture, warm_up
from .graph_runner import CapturedBatch, GraphRunner
from .taps import listening


class OverlappedRunner(GraphRunner):
    """Computes every head, beside the trunk: one graph a batch size, no work skipped.

    Heads share launches, because every fork of the graph delays the trunk: the heads of the last launch run with the
    classifier at the end of the trunk, the others on a low-priority stream beside the blocks that follow them.
    """

    #: Places whose tap ends a launch beside the trunk; set before capture by tests and measurements.
    forks: Sequence[int] | None = None

    def _capture(self, x: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        trunk, side = self._capture_streams.levels(1)[0]
        ends = list(self._forks(len(x)))  # the last place of each launch
        starts = [0, *(end + 1 for end in ends)]
        launches = [
            ExitLaunch(buffers, start, self._places[start : end + 1])
            for start, end in zip(starts, [*ends, len(self._places) - 1], strict=True)
        ]

        def forward() -> None:
            features: list[Tensor] = []

            def on_tap(place: int, y: Tensor) -> None:
                features.append(y)
                if place in ends:
                    launch = ends.index(place)
                    side.wait_stream(trunk)
                    with torch.cuda.stream(side):
                        launches[launch](features[starts[launch] :])

            with listening(self._trunk.module, self.network.taps, on_tap):
                final = self._trunk.module(x)
            if ends:
                trunk.wait_stream(side)
            launches[-1]([*features[starts[-1] :], final])

        warm_up(forward, trunk)
        capture = Capture(self._device, self._pool)
        with capture.capturing(self._trunk.module, trunk):
            forward()
        return CapturedBatch(x, buffers, launches, capture.graphs)

    def _forks(self, size: int) -> Sequence[int]:
        if self.forks is not None:
            return self.forks
        return range(len(self._heads))
