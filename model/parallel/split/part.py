"""``Part``: consecutive segments of a network with their heads, on one GPU, its streams and events; its CUDA graphs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....kernels import ExitBuffers
from ....kernels.cuda.lifetimes import new_event
from ....kernels.cuda.runtime import beside_captures
from ...heads.head import AuxHead
from ...network.early_exit_network import EarlyExitNetwork
from ...runners.captures import Captures
from ...runners.graph_runner import GraphRunner
from ...runners.program import HeadLaunches, capture_program
from ...trunk.trunk import Trunk
from ..segments import Segment


class OnDevice(NamedTuple):
    """A network on one of the devices, cut."""

    network: EarlyExitNetwork
    """The user's, or a copy."""
    trunk: Trunk
    """Of its backbone, that the segments were cut from."""
    segments: Mapping[int, Sequence[Segment]]
    """All of its backbone, by the batch size that they are for."""


def take_captures(device: torch.device) -> Captures:
    """Take streams and memory of a device."""
    with torch.cuda.device(device):
        return Captures(device, GraphRunner.trunk_priority)


class Part:
    """What one of the devices runs of a network, with streams for all batch sizes, and events that order parts."""

    def __init__(self, number: int, device: torch.device, there: OnDevice, start: int, end: int) -> None:
        """Take the segments from ``start`` to before ``end`` of a network that is on the device, and streams there."""
        self.number, self.device, self.start, self.end = number, device, start, end
        self._network, self.choosing = there.network, there.trunk.choosing
        self._refresh_trunk = there.trunk.refresh
        self.segments = {size: of_size[start:end] for size, of_size in there.segments.items()}
        self.heads: list[AuxHead] = there.network.exit_heads[start:end]
        """One a segment, but for the classifier's."""
        self.is_last = len(self.heads) < end - start
        self.modules = nn.ModuleList(
            [*(segment.module for of_size in self.segments.values() for segment in of_size), *self.heads]
        )
        self.captures = take_captures(device)
        streams = self.captures.streams
        self.trunk, self.side = streams.trunk, streams.side
        with torch.cuda.device(device):
            self.copies = streams.copies
            """Carries activations and answers to the next part's device."""
            if self.heads:  # modules and libraries call cuBLAS
                streams.allocate_workspaces(self.side)
        self.computed = new_event()
        """Behind the latest graph of the trunk."""
        self.handed = new_event()
        """Behind the latest copies of activations to the next part."""
        self.judged = new_event()
        """Behind the latest launch of the heads that run once the part's trunk is done."""
        self.answered = new_event()
        """Behind the latest copies of answers to the next part, which come last."""

    def take_rules(self, network: EarlyExitNetwork) -> None:
        """Take over the rules of the user's network where these are copies, before all of the part's later work."""
        with torch.cuda.stream(self.trunk):
            for own, head in zip(self.heads, network.exit_heads[self.start : self.end], strict=False):
                if own is not head and own.rule.numbers != head.rule.numbers:
                    own.rule.assign(head.rule)

    def refresh(self, network: EarlyExitNetwork) -> None:
        """Copy parameters and buffers of the user's network where these are copies, on the current streams."""
        now = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        with torch.no_grad():
            for name, own in (*self._network.named_parameters(), *self._network.named_buffers()):
                if own is not now[name]:
                    own.copy_(now[name])
            for own_head, head in zip(self.heads, network.exit_heads[self.start : self.end], strict=False):
                if own_head is not head:
                    own_head.load_state_dict(head.state_dict())
        self._refresh_trunk()


def wait_for(parts: Iterable[Part]) -> None:
    """Let the host wait for all that is under way on parts."""
    with beside_captures():
        for part in parts:
            with torch.cuda.device(part.device):
                part.captures.wait()
                part.copies.synchronize()


def free(parts: list[Part]) -> None:
    """Wait for what is under way on all parts, each of which may copy to another one, and free all, and the list.

    An interrupted wait frees nothing; doing it twice is fine.
    """
    with suppress(RuntimeError):  # where a device is lost nothing is under way any more
        wait_for(parts)
    while parts:
        parts.pop().captures.free_or_leave()


def free_or_leave(parts: list[Part]) -> None:
    """Free all, or leave what was captured until the next runner is made, if an interrupt comes."""
    try:
        free(parts)
    finally:
        for part in parts:
            part.captures.free_or_leave()


def wait_for_current_streams(devices: Iterable[torch.device]) -> None:
    """Let the host wait for the current stream of each device: streams of parts may then use what it has written."""
    for device in {*devices}:
        torch.cuda.current_stream(device).synchronize()


def reach_each_other(devices: Iterable[torch.device]) -> None:
    """Let devices copy from each other without the host in between, where they can; PyTorch does so at a first copy."""
    for source, target in permutations({*devices}, 2):
        torch.zeros(1, device=source).to(target)


class PartGraphs:
    """What a part computes for batches of one size, from ``taken`` to ``handed`` and ``buffers``, cut for answers.

        [taken] -> trunk graph -> trunk graph ... -> [handed]      beside all but the first, heads on the side stream
                                            `-> graph of the heads that are left; of the last part with the classifier

    The first trunk graph needs the activations of the part before alone. All others have heads, which need its answers,
    too: those come later.
    """

    def __init__(
        self,
        part: Part,
        size: int,
        taken: Sequence[Tensor],
        buffers: ExitBuffers,
        forks: Sequence[int],
        open_samples: Tensor | None,
    ) -> None:
        """Capture a part for batches of a size, on its device, which is current.

        The graphs read what is ``taken``, which holds an example. ``forks`` are indices of segments, but for the last,
        after which a launch leaves the trunk, which is cut there, with all heads since the one before. For
        ``open_samples`` ([launches] int64 in pinned memory, one less for the last part) see :class:`ExitLaunch`.
        """
        self.part, self.taken, self.buffers = part, taken, buffers
        self._forks, self._size = forks, size
        exits = [*(head.as_exit_head() for head in part.heads), *[None] * part.is_last]
        self.heads = HeadLaunches(buffers, exits, part.heads, forks, first=part.start, open_samples=open_samples)
        program = capture_program(self._forward, None, taken, part.trunk, part.captures.memory, [part.modules])
        self.handed, self.resizable = program.result, program.resizable
        *self.trunk, self.judge = program.graphs
        """Of the trunk, in the order in which they are launched; and of the heads that are left, launched behind."""

    def _forward(self, cut: Callable[[], None]) -> list[Tensor]:
        """Run the part on its trunk's stream, which is current, and return what it hands over, dense in memory."""
        part, outputs = self.part, list[Tensor]()
        trunk, side = part.trunk, part.side
        values: Sequence[Tensor] = self.taken
        for index, segment in enumerate(part.segments[self._size]):
            output, *values = segment.module(*values)
            outputs.append(output.resolve_neg())
            if index in self._forks:
                launch = self._forks.index(index)
                self.heads.launch_beside(launch, outputs, side, cut)
        if self._forks:
            trunk.wait_stream(side)
        handed = [_dense(each) for each in values]
        cut()
        if part.is_last:
            self.heads.launch(len(self._forks), outputs)
        else:  # beside other parts, which may be on this device
            self.heads.launch_beside(len(self._forks), outputs, side)
            trunk.wait_stream(side)
        return handed

    def run_once(self) -> list[Tensor]:
        """Run the trunk on the example and return what it hands over, once it is there."""
        for graph in self.trunk:
            graph.launch(self.part.trunk)
        self.part.trunk.synchronize()
        return self.handed


def _dense(x: Tensor) -> Tensor:
    """Return an activation as it is copied: all bytes from its first one on are its own."""
    x = x.resolve_conj().resolve_neg()
    return x if torch.empty_like(x, device="meta").stride() == x.stride() else x.contiguous()
