"""``PartGraphs``: a part of a network as CUDA graphs for one batch size: its trunk, cut where heads need answers.

    [taken] -> trunk graph -> trunk graph ... -> [handed]      beside all but the first, heads on the side stream
                                        `-> graph of the heads that are left; of the last part with the classifier

The first trunk graph needs the activations of the part before alone. All others have heads, which need its answers,
too: those come later.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....kernels import ExitBuffers, ExitLaunch
from ...runners.capture import Capture, Graph, warm_up
from .part import Part
from .streams import PartStreams


class PartGraphs:
    """What a part computes for batches of one size, from ``taken`` to ``handed`` and ``buffers``."""

    def __init__(
        self,
        streams: PartStreams,
        size: int,
        taken: Sequence[Tensor],
        buffers: ExitBuffers,
        forks: Sequence[int],
        open_samples: Tensor | None,
    ) -> None:
        """Capture a part, on its device, which is current.

        Args:
            streams: of the part.
            size: of batches.
            taken: at the addresses that the graphs read; they hold an example.
            buffers: of all exits of the network, on this device.
            forks: indices of the part's segments after which a launch leaves the trunk, with all heads since the one
                before. The last segment is none of them.
            open_samples: [launches] int64 in pinned memory; see :class:`ExitLaunch`. The trunk is then cut at every
                fork, else at the first alone. The last part has one number less than launches.
        """
        part = streams.part
        self.streams, self.taken, self.buffers = streams, taken, buffers
        self._part, self._forks, self._size = part, forks, size
        self._cuts = forks if open_samples is not None else forks[:1]
        self.launches = _launches(part, buffers, forks, open_samples)
        stream = streams.trunk
        warm_up(lambda: self._forward(lambda: None), lambda: None, stream)
        capture = Capture(part.device, streams.captures.memory)
        with capture.capturing(stream, part.modules):
            self.handed = self._forward(capture.cut)
        self.trunk: list[Graph] = capture.graphs[:-1]
        """In the order in which they are launched."""
        self.judge: Graph = capture.graphs[-1]
        """Of the heads that are left, launched behind them."""

    def _forward(self, cut: Callable[[], None]) -> list[Tensor]:
        """Run the part on its trunk's stream, which is current, and return what it hands over, dense in memory."""
        trunk, side = self.streams.trunk, self.streams.side
        part, read = self._part, _HeadInputs(self._part)
        values: Sequence[Tensor] = self.taken
        for index, segment in enumerate(part.segments[self._size]):
            output, *values = segment.module(*values)
            read.outputs.append(output.resolve_neg())
            if index in self._forks:
                launch = self._forks.index(index)
                if index in self._cuts:
                    if launch > 0:
                        trunk.wait_stream(side)
                    cut()
                side.wait_stream(trunk)
                with torch.cuda.stream(side):
                    self.launches[launch](read.since_last(index + 1))
        if self._forks:
            trunk.wait_stream(side)
        handed = [_dense(each) for each in values]
        cut()
        if part.is_last:
            self.launches[-1](read.since_last(len(read.outputs)))
        else:  # beside other parts, which may be on this device
            side.wait_stream(trunk)
            with torch.cuda.stream(side):
                self.launches[-1](read.since_last(len(read.outputs)))
            trunk.wait_stream(side)
        return handed

    def run_once(self) -> list[Tensor]:
        """Run the trunk on the example and return what it hands over, once it is there."""
        for graph in self.trunk:
            graph.launch(self.streams.trunk)
        self.streams.trunk.synchronize()
        return self.handed


class _HeadInputs:
    """Outputs of a part's segments, and which of them heads have not read yet."""

    def __init__(self, part: Part) -> None:
        self.outputs: list[Tensor] = []
        self._part, self._read = part, 0

    def since_last(self, end: int) -> list[Tensor]:
        """Return what launches read for the exits that are left up to ``end``; runs heads that are modules."""
        outputs, heads = self.outputs[self._read : end], self._part.heads[self._read : end]
        self._read = end
        reads = [head.launch_input(x).resolve_neg() for head, x in zip(heads, outputs, strict=False)]
        return [*reads, *outputs[len(reads) :]]


def _launches(part: Part, buffers: ExitBuffers, forks: Sequence[int], open_samples: Tensor | None) -> list[ExitLaunch]:
    """Return a launch for each fork and, last, one for the exits behind the last fork."""
    exits = [head.as_exit_head() for head in part.heads]
    starts = [0, *(fork + 1 for fork in forks)]
    told = [] if open_samples is None else [open_samples[index : index + 1] for index in range(len(open_samples))]
    launches = []
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], part.end - part.start], strict=True)):
        of_launch = [*exits[start:end], *([None] if end > len(exits) else [])]
        tells = told[index] if index < len(told) else None
        launches.append(ExitLaunch(buffers, part.start + start, of_launch, open_samples=tells))
    return launches


def _dense(x: Tensor) -> Tensor:
    """Return an activation as it is copied: all bytes from its first one on are its own."""
    x = x.resolve_conj().resolve_neg()
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()
