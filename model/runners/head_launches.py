"""``HeadLaunches``: the heads of a network divided among launches, one at each stop and one at the end."""

from collections.abc import Sequence

from torch import Tensor

from ...kernels import ExitBuffers, ExitHead, ExitLaunch


class HeadLaunches:
    """At each of some taps one launch for all heads since the stop before; at the end one for the other exits."""

    def __init__(
        self,
        buffers: ExitBuffers,
        exits: Sequence[ExitHead | None],
        stops: Sequence[int],
        *,
        open_samples: Tensor | None = None,
        conditions: Tensor | None = None,
    ) -> None:
        """Prepare the launches of all heads and last the classifier, None where its logits are given.

        The stops are indices of taps, ascending. For ``open_samples`` ([stops] int64 in pinned memory) and
        ``conditions`` ([stops] int64) see :class:`ExitLaunch`.
        """
        starts = [0, *(stop + 1 for stop in stops)]
        self._exits_of = [slice(start, end) for start, end in zip(starts, [*starts[1:], len(exits)], strict=True)]
        self.launches = [
            ExitLaunch(
                buffers,
                part.start,
                exits[part],
                open_samples=None if open_samples is None or i == len(stops) else open_samples[i : i + 1],
                condition=None if conditions is None or i == len(stops) else conditions[i : i + 1],
            )
            for i, part in enumerate(self._exits_of)
        ]
        """Launches in the order of the stops; the last one has the classifier."""

    def launch(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Launch one of them on the current stream, given the outputs of all taps so far and, last, of the trunk."""
        self.launches[index](outputs[self._exits_of[index]])
