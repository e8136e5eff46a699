"""The overlapped runner: the whole network in one CUDA graph, heads beside the trunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import ExitBuffers, ExitLaunch
from .capture import Capture, warm_up
from .graph_runner import CapturedBatch, GraphRunner, listed
from .taps import listening

#: A launch beside the trunk starts while at least this share of the trunk's time is left to hide it.
_SHARE_TO_HIDE_BEHIND = 0.15


class OverlappedRunner(GraphRunner):
    """Computes every head, beside the trunk: one graph a batch size, no work skipped.

    Heads share launches, because every fork of the graph delays the trunk. Those whose taps come late, with too little
    of the trunk left to hide behind, run with the classifier in one launch at the end of the trunk; the others on a
    low-priority stream beside it. The times of the segments, measured before the capture, tell which is which.
    """

    def _capture(self, x: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        trunk, side = self._capture_streams.pair
        ends = _forks(self._segment_times(x), len(x))  # the last place of each launch beside the trunk
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
        description = f"one graph; heads beside the trunk after {listed(ends, self.network.taps) or 'no tap'}"
        if starts[-1] < len(self._heads):
            late = range(starts[-1], len(self._heads))
            description += f"; with the classifier those of {listed(late, self.network.taps)}"
        return CapturedBatch(x, buffers, launches, capture.graphs, description + ".")


def _forks(segment_us: Sequence[float], samples: int) -> list[int]:
    """Choose the taps at which heads leave the trunk: all heads since the one before share a launch.

    One fork is best for small batches, where each costs the trunk about a microsecond, and for large ones, where heads
    compete with the trunk for memory; in between, heads that start early find idle multiprocessors (ResNet-18, H200).
    """
    left = [sum(segment_us[place + 1 :]) for place in range(len(segment_us) - 1)]
    late_enough = [place for place, us in enumerate(left) if us >= _SHARE_TO_HIDE_BEHIND * sum(segment_us)]
    if not late_enough:
        return []
    return list(range(late_enough[-1] % 2, late_enough[-1] + 1, 2)) if 16 <= samples < 64 else late_enough[-1:]
