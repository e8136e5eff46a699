"""The overlapped runner: the whole network in one CUDA graph, heads beside the trunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import ExitBuffers, ExitLaunch
from ..early_exit_network import EarlyExitNetwork
from ..taps import listening
from ..trunk.trunk import Trunk
from .capture import Capture, warm_up
from .captured_batch import CapturedBatch
from .graph_runner import GraphRunner, listed

#: A launch beside the trunk starts while at least this share of the trunk's time is left to hide it.
_SHARE_TO_HIDE_BEHIND = 0.2


class OverlappedRunner(GraphRunner):
    """Computes every head, beside the trunk: one graph a batch size, no work skipped.

    Heads share launches, because every fork of the graph delays the trunk. Those whose taps come late, with too little
    of the trunk left to hide behind, run with the classifier in one launch at the end of the trunk; the others on a
    low-priority stream beside it. The times of the segments, measured before the capture, tell which is which, unless
    ``forks`` says so.
    """

    def __init__(
        self,
        network: EarlyExitNetwork,
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str | Trunk = "as_is",
        forks: Sequence[str] | None = None,
    ) -> None:
        """Capture ``network``; see :class:`GraphRunner`.

        Args:
            network: see :class:`GraphRunner`.
            example_input: see :class:`GraphRunner`.
            batch_sizes: see :class:`GraphRunner`.
            trunk: see :class:`GraphRunner`.
            forks: taps after which a launch leaves the trunk, with all heads since the one before; heads behind the
                last run with the classifier. None of them, ``()``, is no overlap: all heads in one launch at the end.
                None is by rule, from the times of the segments.
        """
        self._forks = None if forks is None else _places(forks, network.taps)
        self.forks: dict[int, tuple[str, ...]] = {}
        """By batch size, the taps after which a launch leaves the trunk."""
        super().__init__(network, example_input, batch_sizes=batch_sizes, trunk=trunk)

    def _choose_forks(self, x: Tensor) -> list[int]:
        """Return the last place of each launch beside the trunk."""
        ends = forks_by_rule(self._segment_times(x), len(x), self._classes) if self._forks is None else self._forks
        self.forks[len(x)] = tuple(self.network.taps[end] for end in ends)
        return ends

    def _capture(self, x: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        trunk, side = self._capture_streams.pair
        ends = self._choose_forks(x)
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


def _places(forks: Sequence[str], taps: Sequence[str]) -> list[int]:
    """Return the places of the taps at which to fork."""
    if isinstance(forks, str) or not isinstance(forks, Sequence):
        raise TypeError(f"forks: got {forks!r}, wants a sequence of taps, or None")
    for tap in forks:
        if tap not in taps:
            raise ValueError(f"forks: got {tap!r}, wants taps of the network: {', '.join(taps)}")
    return [place for place, tap in enumerate(taps) if tap in forks]


def fork_choices(last: int) -> list[list[int]]:
    """Return where heads may leave the trunk, the fewest forks first: after one tap, every other one, each.

    Args:
        last: the place of the last tap that is followed by enough of the trunk to hide a launch behind.
    """
    choices = ([last], _every_other(last), list(range(last + 1)))
    return [choice for place, choice in enumerate(choices) if choice not in choices[:place]]


def forks_by_rule(segment_us: Sequence[float], samples: int, classes: int) -> list[int]:
    """Choose the taps at which heads leave the trunk: all heads since the one before share a launch.

    Heads that start early find idle multiprocessors, which is worth the microsecond that each fork costs the trunk. One
    fork is best for large batches, where heads compete with the trunk for memory, and for small ones with many classes,
    whose heads all read their weights from the L2 cache (ResNet-18, H200).
    """
    left = [sum(segment_us[place + 1 :]) for place in range(len(segment_us) - 1)]
    late_enough = [place for place, us in enumerate(left) if us >= _SHARE_TO_HIDE_BEHIND * sum(segment_us)]
    if not late_enough:
        return []
    last = late_enough[-1]
    return _every_other(last) if samples < 64 and (samples >= 16 or classes <= 128) else [last]


def _every_other(last: int) -> list[int]:
    return list(range(last % 2, last + 1, 2))
