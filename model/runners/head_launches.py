"""``HeadLaunches``: the heads of a network divided among launches, one at each stop and one at the end."""

from collections.abc import Sequence

from torch import Tensor

from ...kernels import ExitBuffers, ExitHead, ExitLaunch
from ..module_head import AuxHead


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
        self._heads = heads
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
        """Launch one of them on the current stream, given the outputs of all taps so far and, last, of the trunk.

        Modules of heads that are not fused run before it, on this stream.
        """
        part = self._exits_of[index]
        outputs = outputs[part]
        reads = [head.launch_input(x).resolve_neg() for head, x in zip(self._heads[part], outputs, strict=False)]
        self.launches[index]([*reads, *outputs[len(reads) :]])
