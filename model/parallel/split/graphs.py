"""``PartGraphs``: a part of a network as CUDA graphs for one batch size: its trunk, cut where heads need answers.

    [taken] -> trunk graph -> trunk graph ... -> [handed]      beside all but the first, heads on the side stream
                                        `-> graph of the heads that are left; of the last part with the classifier

The first trunk graph needs the activations of the part before alone. All others have heads, which need its answers,
too: those come later.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....kernels import ExitBuffers
from ...runners.capture import Capture, Graph, warm_up
from ...runners.captured_batch import HeadLaunches
from .part import PartStreams


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
        exits = [*(head.as_exit_head() for head in part.heads), *[None] * part.is_last]
        self.heads = HeadLaunches(buffers, exits, part.heads, forks, first=part.start, open_samples=open_samples)
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
        part, outputs = self._part, list[Tensor]()
        values: Sequence[Tensor] = self.taken
        for index, segment in enumerate(part.segments[self._size]):
            output, *values = segment.module(*values)
            outputs.append(output.resolve_neg())
            if index in self._forks:
                launch = self._forks.index(index)
                if index in self._cuts:
                    if launch > 0:
                        trunk.wait_stream(side)
                    cut()
                side.wait_stream(trunk)
                with torch.cuda.stream(side):
                    self.heads.launch(launch, outputs)
        if self._forks:
            trunk.wait_stream(side)
        handed = [_dense(each) for each in values]
        cut()
        if part.is_last:
            self.heads.launch(len(self._forks), outputs)
        else:  # beside other parts, which may be on this device
            side.wait_stream(trunk)
            with torch.cuda.stream(side):
                self.heads.launch(len(self._forks), outputs)
            trunk.wait_stream(side)
        return handed

    def run_once(self) -> list[Tensor]:
        """Run the trunk on the example and return what it hands over, once it is there."""
        for graph in self.trunk:
            graph.launch(self.streams.trunk)
        self.streams.trunk.synchronize()
        return self.handed


def _dense(x: Tensor) -> Tensor:
    """Return an activation as it is copied: all bytes from its first one on are its own."""
    x = x.resolve_conj().resolve_neg()
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()
