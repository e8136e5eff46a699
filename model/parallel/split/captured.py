"""``SplitBatch``: a network on several GPUs for one batch size: its graphs in their order, and the copies between.

    trunk of a part -> activations on its stream for copies -> trunk of the next part
          `-> heads on the side stream -> answers on the stream for copies -> heads of the next part

Events alone order all that. A request that was answered early may have left graphs and copies under way: the next one
overwrites nothing that they use before they are done.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels import CRITERIA, ExitBuffers
from ....kernels.cuda.lifetimes import MemoryPool
from ...answers.exit_result import ExitResult
from ...listening.taps import list_taps
from ...network.early_exit_network import EarlyExitNetwork
from ...runners.capture import copy_memory
from ...runners.captures import Captures
from ...runners.overlapped import forks_by_rule
from ...runners.polled import CapturedSegments, PolledBatch, stops_by_rule
from ...runners.program import StaticInput, capture_program
from ...runners.segment_times import measure_segments
from ..segments import Segment
from .part import Part, PartGraphs


class _TrunkGraph(NamedTuple):
    """A graph of the trunk, by its part and its number there."""

    part: int
    number: int


class SplitBatch:
    """Answers for batches of one size by the graphs of all parts."""

    def __init__(
        self,
        static: StaticInput,
        parts: Sequence[PartGraphs],
        open_samples: Tensor | None,
        description: str,
        *,
        patient: bool,
    ) -> None:
        """Answer for a static batch, which the first part takes.

        The host is told in ``open_samples``, [pieces of the trunk - 1] int64 in pinned memory, how many stay open; None
        if it does not ask. ``patient`` says that some head wants to know what earlier ones have said.
        """
        self._graphs = parts
        self._parts = [one.part for one in parts]
        self.resizable = {key: each for part in parts for key, each in part.resizable.items()}
        self._pieces = [_TrunkGraph(part, number) for part, one in enumerate(parts) for number in range(len(one.trunk))]
        none = torch.zeros(0, dtype=torch.int64, device="cpu")
        launches = [launch for part in parts for launch in part.heads.launches]
        graphs = [graph for part in parts for graph in (*part.trunk, part.judge)]
        segments = CapturedSegments(graphs, launches, none if open_samples is None else open_samples, [])
        # takes batches in, hands answers out and counts requests; keeps all that graphs use
        self.batch = PolledBatch(static, parts[0].buffers, segments, description, ())
        self._answers = [
            _answers(one, following, polled=open_samples is not None, patient=patient)
            for one, following in zip(parts, parts[1:], strict=False)
        ]

    def begin(self, x: Tensor, caller: torch.cuda.Stream, began: torch.cuda.Event) -> None:
        """Copy in the batch of a new request, once the caller's stream has got there."""
        first = self._parts[0]
        began.record(caller)
        first.trunk.wait_event(began)
        first.trunk.wait_event(first.answered)  # the last request's heads and copies, which read what comes now
        self.batch.fill(x, first.trunk)
        self.batch.next_request()

    def answer(self, x: Tensor, caller: torch.cuda.Stream, began: torch.cuda.Event, *, polls: bool) -> ExitResult:
        """Answer by all graphs; with ``polls`` launch no more once no sample is open: the host waits to be told."""
        self.begin(x, caller, began)
        pieces = len(self._pieces)
        for piece in range(min(2, pieces) if polls else pieces):
            self._launch(piece)
        for stop in range(pieces - 1 if polls else 0):  # behind that piece; its heads run beside the next one
            if self._poll(stop) == 0:
                return self._answer_of(self._pieces[stop].part, caller, wait=False)
            if stop + 2 < pieces:
                self._launch(stop + 2)
        return self._answer_of(len(self._parts) - 1, caller, wait=True)

    def _poll(self, stop: int) -> int:
        """Return how many samples stay open at a stop, once its heads have said so."""
        part, following = self._pieces[stop].part, self._pieces[stop + 1].part
        its = self._parts[part]
        return self.batch.poll(stop, its.trunk if part == following else its.side)

    def _launch(self, number: int) -> None:
        """Launch a piece of the trunk, with the crossing before it or the last heads behind it."""
        piece = self._pieces[number]
        part, graphs = self._parts[piece.part], self._graphs[piece.part]
        if piece.number == 0 and piece.part > 0:
            self._cross(piece.part - 1)
        with torch.cuda.device(part.device):
            if piece.number == 1 and piece.part > 0:
                part.trunk.wait_event(self._parts[piece.part - 1].answered)
            graphs.trunk[piece.number].launch(part.trunk)
            if number == len(self._pieces) - 1:
                if piece.number == 0 and piece.part > 0:
                    part.trunk.wait_event(self._parts[piece.part - 1].answered)
                graphs.judge.launch(part.trunk)
            part.computed.record(part.trunk)

    def _cross(self, number: int) -> None:
        """Hand the activations of a part to the next one, and behind them what its heads have said by then."""
        source, target = self._parts[number], self._parts[number + 1]
        graphs, following = self._graphs[number], self._graphs[number + 1]
        with torch.cuda.device(source.device):
            copies, side = source.copies, source.side
            copies.wait_event(target.computed)  # by the last request, which read what is overwritten
            copies.wait_event(target.answered)
            copies.wait_event(source.computed)
            for into, each in zip(following.taken, graphs.handed, strict=True):
                copy_between(into, each, copies)
            source.handed.record(copies)

            side.wait_event(source.computed)
            if number > 0:
                side.wait_event(self._parts[number - 1].answered)
            graphs.judge.launch(side)
            source.judged.record(side)
            copies.wait_event(source.judged)
            for into, each in self._answers[number]:
                copy_between(into, each, copies)
            source.answered.record(copies)
        target.trunk.wait_event(source.handed)

    def _answer_of(self, number: int, caller: torch.cuda.Stream, *, wait: bool) -> ExitResult:
        """Copy the answer of a part out on the caller's stream, which ``wait`` lets wait for the part's trunk."""
        if wait:
            caller.wait_event(self._parts[number].computed)
        packed, answer = self.batch.empty_answer()
        copy_between(packed, self._graphs[number].buffers.packed_answer, caller)
        return answer


def _answers(part: PartGraphs, following: PartGraphs, *, polled: bool, patient: bool) -> list[tuple[Tensor, Tensor]]:
    """Return what is copied of the answers of a part, each with where it is copied to."""
    own, others = part.buffers, following.buffers
    copied = [(others.packed_answer, own.packed_answer)]
    if polled:
        copied.append((others.requests, own.requests))
    if patient:
        end = part.part.end
        copied += [(others.label[:end], own.label[:end]), (others.confidence[:end], own.confidence[:end])]
    return copied


def copy_between(into: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
    """Copy memory of one layout, on a device or between two of them, on a stream of either; does not wait.

    ``Tensor.copy_`` would order the current streams of both devices.
    """
    copy_memory(into.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream)


def graph_times(network: EarlyExitNetwork, segments: Sequence[Segment], x: Tensor, captures: Captures) -> list[float]:
    """Measure what each segment takes for a batch, as a graph without heads, in microseconds.

    All are run on the device of ``captures``, where the batch, the segments and the network are.
    """
    static = StaticInput(x)

    def forward(cut: Callable[[], None]) -> None:
        handed: Sequence[Tensor] = (static.x,)
        for index, segment in enumerate(segments):
            if index > 0:
                cut()
            _, *handed = segment.module(*handed)

    trunk, memory = captures.streams.trunk, MemoryPool(captures.device)
    program = capture_program(forward, static, [static.x], trunk, memory, [network])
    return measure_segments(program.graphs, static.refill, trunk)


def forks_of(part: Part, segment_us: Sequence[float], *, polls: bool) -> list[int]:
    """Return after which of a part's segments a launch of heads leaves the trunk, by times of all segments.

    Where the host does not ask, nothing is gained by it but in the last part: heads of others run behind their trunk,
    while the next part's device is busy.
    """
    own = segment_us[part.start : part.end]
    if polls:
        return stops_by_rule(own)
    return forks_by_rule(own) if part.is_last else []


def capture_split(
    network: EarlyExitNetwork,
    parts: Sequence[Part],
    x: Tensor,
    segment_us: Sequence[float],
    *,
    polls: bool,
) -> SplitBatch:
    """Capture all parts for batches like the example, one after the other, each with what the one before hands over."""
    size, heads = len(x), network.exit_heads
    classes, places = heads[0].num_classes, len(heads) + 1
    with_probs = all(head.return_probs for head in heads)
    forks = [forks_of(part, segment_us, polls=polls) for part in parts]
    stops = sum(len(each) + 1 for each in forks) - 1
    open_samples = torch.zeros(stops, dtype=torch.int64, device="cpu").pin_memory() if polls else None
    static = StaticInput(x)
    taken, captured, first_stop = [static.x], [], 0
    for part, of_part in zip(parts, forks, strict=True):
        with torch.cuda.device(part.device):
            monitor = network.monitor
            buffers = ExitBuffers.allocate(
                places, size, classes, with_probs=with_probs, device=part.device,
                tallies=None if monitor is None else monitor.tallies_on(part.device),
            )  # fmt: skip
            of_stops = None if open_samples is None else open_samples[first_stop : first_stop + len(of_part) + 1]
            with part.choosing(size):
                captured.append(PartGraphs(part, size, taken, buffers, of_part, of_stops))
            first_stop += len(of_part) + 1
            if not part.is_last:
                handed = captured[-1].run_once()
                following = parts[part.number + 1].device
                taken = [torch.empty_like(each, device=following).copy_(each) for each in handed]
                torch.cuda.current_stream(part.device).synchronize()
        if not part.is_last:
            torch.cuda.current_stream(following).synchronize()
    patient = any(CRITERIA[head.rule.criterion].counts_heads for head in heads)
    said = [_described(part, of_part, network.taps) for part, of_part in zip(parts, forks, strict=True)]
    return SplitBatch(static, captured, open_samples, f"{'; '.join(said)}.", patient=patient)


def _described(part: Part, forks: Sequence[int], taps: Sequence[str]) -> str:
    beside = list_taps([part.start + fork for fork in forks], taps)
    last = "with the classifier" if part.is_last else "behind the trunk"
    return f"{part.device}: heads beside the trunk after {beside}, the others {last}"
