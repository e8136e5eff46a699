"""``Part``: consecutive segments of a network with their heads, on one device; its streams, and its CUDA graphs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....kernels import ExitBuffers
from ....kernels.cuda.lifetimes import new_event
from ....kernels.cuda.runtime import beside_captures, new_stream
from ...answers.exit_rule import ExitRule
from ...heads.head import AuxHead
from ...network.early_exit_network import EarlyExitNetwork
from ...runners.capture import Graph
from ...runners.captures import Captures
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


class Part:
    """What one of the devices runs of a network."""

    def __init__(self, number: int, device: torch.device, there: OnDevice, start: int, end: int) -> None:
        """Take segments of a network that is on the device.

        Args:
            number: of the part, from 0.
            device: of the part.
            there: the network there.
            start: index of the part's first segment.
            end: index behind its last one.
        """
        network, trunk, segments = there
        self.number, self.device, self.start, self.end = number, device, start, end
        self._network, self._trunk = network, trunk
        self.segments = {size: of_size[start:end] for size, of_size in segments.items()}
        self.heads: list[AuxHead] = network.exit_heads[start:end]
        """One a segment, but for the classifier's."""
        self.modules = nn.ModuleList(
            [*(segment.module for of_size in self.segments.values() for segment in of_size), *self.heads]
        )

    @property
    def is_last(self) -> bool:
        """Whether it ends with the classifier."""
        return len(self.heads) < self.end - self.start

    @property
    def rules(self) -> list[ExitRule]:
        """Of its heads."""
        return [head.rule for head in self.heads]

    def choosing(self, samples: int) -> AbstractContextManager[None]:
        """Let the trunk of a captured part take the fastest algorithms for a batch size; see :meth:`Trunk.choosing`."""
        return self._trunk.choosing(samples)

    def take_rules(self, network: EarlyExitNetwork) -> None:
        """Take over the rules of the user's network where these are copies, on the current stream of the device."""
        for own, head in zip(self.rules, network.exit_heads[self.start : self.end], strict=False):
            if own is not head.rule and _values(own) != _values(head.rule):
                own.assign(head.rule)

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
        self._trunk.refresh()


def _values(rule: ExitRule) -> tuple[str, float, float, bool]:
    return rule.criterion, rule.threshold, rule.temperature, rule.enabled


#: That of a trunk's graphs: see GraphRunner.
_PRIORITY = -1
#: Streams for copies that no part has now, by device.
_free: dict[torch.device, list[torch.cuda.Stream]] = {}


class PartStreams:
    """Streams of one part, for all batch sizes, and the events by which parts wait for each other."""

    def __init__(self, part: Part) -> None:
        """Take streams and memory of the part's device."""
        self.part, self.device = part, part.device
        with torch.cuda.device(self.device):
            self.captures = Captures(self.device, _PRIORITY)
            streams = self.captures.streams
            self.trunk, self.side = streams.trunk, streams.side
            free = _free.setdefault(self.device, [])
            self.copies = free.pop() if free else new_stream(self.device, _PRIORITY)
            """Carries activations and answers to the next part's device."""
        self.computed = new_event()
        """Behind the latest graph of the trunk."""
        self.handed = new_event()
        """Behind the latest copies of activations to the next part."""
        self.judged = new_event()
        """Behind the latest launch of the heads that run once the part's trunk is done."""
        self.answered = new_event()
        """Behind the latest copies of answers to the next part, which come last."""

    def allocate_workspaces(self) -> None:
        """Let cuBLAS have workspaces for the side stream, where heads are modules."""
        with torch.cuda.device(self.device):
            self.captures.streams.allocate_workspaces(self.side)

    def wait(self) -> None:
        """Let the host wait for all that is under way."""
        with torch.cuda.device(self.device):
            self.captures.wait()
            self.copies.synchronize()

    def free(self) -> None:
        """Free memory, once nothing is under way on any part, and let others have the streams."""
        self.captures.free_or_leave()
        _free.setdefault(self.device, []).append(self.copies)


class AllStreams:
    """Those of all parts, freed together: each may be copying to another one.

    It knows no runner, so that it is whole when the collector finds a runner in garbage.
    """

    def __init__(self) -> None:
        self.parts: list[PartStreams] = []

    def take(self, parts: Sequence[Part]) -> None:
        """Take streams for parts; what was taken is freed by ``free``, after an error, too."""
        for part in parts:
            self.parts.append(PartStreams(part))

    def wait(self) -> None:
        """Let the host wait for all that is under way."""
        with beside_captures():
            for one in self.parts:
                one.wait()

    def free(self) -> None:
        """Wait for what is under way and free all; an interrupted wait frees nothing. Doing it twice is fine."""
        if self.parts:
            with suppress(RuntimeError):  # where a device is lost nothing is under way any more
                self.wait()
            parts, self.parts = self.parts, []
            for one in parts:
                one.free()

    def free_or_leave(self) -> None:
        """Free all, or leave what was captured until the next runner is made, if an interrupt comes."""
        try:
            self.free()
        finally:
            for one in self.parts:
                one.captures.free_or_leave()


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
        program = capture_program(self._forward, None, taken, streams.trunk, streams.captures.memory, [part.modules])
        self.handed, self.resizable = program.result, program.resizable
        self.trunk: list[Graph] = program.graphs[:-1]
        """In the order in which they are launched."""
        self.judge: Graph = program.graphs[-1]
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
