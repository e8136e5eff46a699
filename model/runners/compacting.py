"""``CompactingRunner``: a polled runner in which the samples that stay open go on in smaller batches."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...kernels import CRITERIA, ExitBuffers
from ...kernels.compaction import collect, destination, gather_open, moves_rows, new_destinations
from ...kernels.cuda.lifetimes import MemoryPool
from ...kernels.exits import Answer
from ..answers.exit_result import ExitResult
from ..listening.taps import list_taps
from .capture import Graph
from .polled import CapturedSegments, PolledBatch, PolledRunner
from .program import CapturedBatch, StaticInput
from .segment_times import choose_stops

# In microseconds, as an H200 and its host have them.

#: The trunk after a stop takes at least this long, for the largest batch; below it no gathering can pay for the stop.
_LEAST_STOP_US = 80.0
#: The trunk stands still at a stop while the head runs (8), the host sees its number and launches (10), the GPU starts.
_BUBBLE_US = 25.0
#: A move costs this besides: answers are collected at the end, and the gathering may outlast the host's part.
_MOVE_US = 10.0

#: By how much outputs of one layer may differ between batch sizes, for which cuDNN takes other algorithms: the mean
#: difference over the mean. Samples that are taken for others differ by tens of percents.
_ALIKE = {torch.float64: 1e-6, torch.float32: 5e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def choose_moves(left_us: Mapping[int, float], size: int) -> list[int | None]:
    """Choose in which batch size the samples go on that are open at a stop, for each number of them from 0 to ``size``.

    They have come in batches of ``size``. The trunk after the stop takes ``left_us``, by batch size.

    Returns:
        list: the fastest smaller size that holds them, if it saves more than the move costs, else None: they stay.
        Empty if no number of them could save what the wait for it costs.
    """
    smaller = {other: us for other, us in left_us.items() if other < size}
    if not smaller or left_us[size] - min(smaller.values()) <= _BUBBLE_US:
        return []
    paying = [(us, other) for other, us in smaller.items() if left_us[size] - us > _MOVE_US]
    moves: list[int | None] = [None]
    for count in range(1, size + 1):
        holding = [choice for choice in paying if choice[1] >= count]
        moves.append(min(holding)[1] if holding else None)
    return moves


class _RequestAnswer:
    """Memory, as large as the largest batch, that collects the answer of a request whose samples have moved."""

    def __init__(self, largest: ExitBuffers) -> None:
        self._layout = largest.layout
        self.packed = torch.zeros_like(largest.packed_answer)
        self.fields: Answer = largest.answer(self.packed)

    def empty(self, samples: int) -> tuple[Tensor, ExitResult]:
        """Allocate the memory of an answer for some samples; see :meth:`CapturedBatch.empty_answer`."""
        packed = torch.empty_like(self.packed)
        return packed, ExitResult.viewing(packed, self._layout, samples)


class _CompactingBatch(PolledBatch):
    """A network captured for one batch size, which a request may leave for a smaller one at its stops."""

    def __init__(
        self,
        static: StaticInput,
        buffers: ExitBuffers,
        segments: CapturedSegments,
        stops: Sequence[int],
        *,
        answer: _RequestAnswer,
        origin: Tensor | None,
        destinations: Mapping[int, Tensor],
        collecting: Graph | None,
    ) -> None:
        """Own what was captured for a batch; see :class:`PolledBatch`."""
        super().__init__(static, buffers, segments, "", stops)
        self.size = len(static.x)
        self.example = static.example
        self.outputs = segments.outputs  # kept: rows of larger batches are written to them
        self.answer = answer  # of requests that have moved
        self.origin = origin  # see gather_open; None if no request moves here
        self.destinations = destinations  # by the index of a tap, the tables that the graphs read
        self.collecting = collecting  # ends a request that has moved here
        self.moves: list[list[_CompactingBatch | None]] = [[] for _ in stops]
        """For each stop, by the number of open samples: the batch they go on in, or None. Empty: the host need not
        wait for that number."""
        self.refusals: list[str] = []
        self._offered: list[dict[int, _CompactingBatch]] = [{} for _ in stops]

    def offer(self, stop: int, small: "_CompactingBatch", left_us: Mapping[int, float]) -> None:
        """Let requests move to a smaller batch at a stop, where it pays."""
        offered = self._offered[stop]
        offered[small.size] = small
        sizes = (self.size, *offered)
        chosen = choose_moves({size: left_us[size] for size in sizes}, self.size)
        self.moves[stop] = moves = [None if size is None else offered[size] for size in chosen]
        tap_index = self.stops[stop]
        table = torch.zeros_like(self.destinations[tap_index], device="cpu")
        for count, batch in enumerate(moves):
            if batch is not None:
                table[count] = torch.tensor(batch.entry(tap_index))
        self.destinations[tap_index].copy_(table)

    def entry(self, tap_index: int) -> list[int]:
        """Return the row of a table of destinations that leads here from a tap."""
        assert self.origin is not None
        return destination(self.outputs[tap_index], self.origin, self.buffers)

    def update_description(self, taps: Sequence[str]) -> None:
        """Describe what was captured and where requests may move."""
        sentences = [f"{len(self.graphs)} graphs, cut after {list_taps(self.stops, taps)}."]
        for tap_index, moves in zip(self.stops, self.moves, strict=True):
            if sizes := sorted({batch.size for batch in moves if batch is not None}):
                sentences.append(f"Gathered after {taps[tap_index]} into batches of {', '.join(map(str, sizes))}.")
        if len(sentences) == 1:
            sentences.append("Never gathered into a smaller batch.")
        self.description = " ".join([*sentences, *dict.fromkeys(self.refusals)])


class CompactingRunner(PolledRunner):
    """Gathers the samples of a batch that stay open into the next smaller batch that was captured, and goes on there.

    All batch sizes are cut at the same taps, those with enough of the trunk behind them. The head of such a tap runs in
    line, and after it, in the same graph, a launch that moves the rows of open samples to the tap's output in a smaller
    batch, which it reads from a table by their number. The host chooses from the same table as soon as it sees that
    number, and launches the rest of the network for that batch. Where no number of open samples would make up for the
    wait, by the times of the segments, the host does not wait and nothing is gathered.

    Every move is tried out first: in a network that uses more after a tap than the tap's output, samples would meet
    what others have left there; it is not compacted, and ``describe`` says so.
    """

    def _capture(self, example: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        if not self._captured:  # the largest comes first
            self._segment_us = {
                size: self._segment_times(example[:size].contiguous(memory_format=self._trunk.memory_format))
                for size in self._sizes
            }
            self._all_stops = choose_stops(self._segment_us[len(example)], _LEAST_STOP_US)
        larger = [captured for captured in self._captured.values() if isinstance(captured, _CompactingBatch)]
        batch = self._capture_batch(example, buffers, larger[0].answer if larger else _RequestAnswer(buffers))
        for big in larger:
            stops = range(len(self._all_stops))
            self._offer(big, batch, [s for s in stops if batch.size in choose_moves(self._left_us(s), big.size)])
        for captured in (*larger, batch):
            captured.count_requests()
            captured.update_description(self.network.taps)
        return batch

    def _left_us(self, stop: int) -> dict[int, float]:
        """Return by batch size what of the trunk is left after a stop."""
        return {size: sum(us[self._all_stops[stop] + 1 :]) for size, us in self._segment_us.items()}

    def _capture_batch(self, example: Tensor, buffers: ExitBuffers, answer: _RequestAnswer) -> _CompactingBatch:
        size, stops = len(example), self._all_stops
        memory = (
            MemoryPool(self._device) if self._captured else self._captures.memory
        )  # no batch may use what another one reads
        static = self._static(example)
        destinations = {
            tap_index: new_destinations(buffers)
            for stop, tap_index in enumerate(stops)
            if choose_moves(self._left_us(stop), size)
        }
        entered = any(
            size in choose_moves(self._left_us(stop), big) for big in self._captured for stop in range(len(stops))
        )
        origin = torch.zeros(size, dtype=torch.int64, device=self._device) if entered else None

        def gather(tap_index: int, features: Tensor) -> None:
            if origin is not None and tap_index == stops[0]:  # in the first graph, with which only new requests begin
                torch.arange(size, out=origin)
            if tap_index in destinations and moves_rows(features):
                gather_open(features, buffers, origin, destinations[tap_index], answer.fields)

        segments = self._capture_segments(static, buffers, stops, memory, gather)
        collecting = None
        if origin is not None:
            program = self._capture_program(lambda _cut: collect(buffers, origin, answer.fields), static, memory)
            (collecting,) = program.graphs
        return _CompactingBatch(
            static, buffers, segments, stops,
            answer=answer, origin=origin, destinations=destinations, collecting=collecting,
        )  # fmt: skip

    def _offer(self, big: _CompactingBatch, small: _CompactingBatch, stops: Sequence[int]) -> None:
        """Let requests move from one batch to another at some stops, if they are answered as if they had not moved."""
        patient = [index for index, head in enumerate(self._heads) if CRITERIA[head.criterion].counts_heads]
        counting = [stop for stop in stops if any(index > big.stops[stop] for index in patient)]
        movable = [
            stop
            for stop in stops
            if stop not in counting and moves_rows(big.outputs[big.stops[stop]], small.outputs[big.stops[stop]])
        ]
        alike = self._try_out(big, small, movable) if movable else []
        for stop in stops:
            if stop in alike:
                big.offer(stop, small, self._left_us(stop))
                continue
            reason = (
                "a head behind it exits under patience, which counts the labels that earlier heads gave to a row"
                if stop in counting
                else "more than the tap's output is used after it"
                if stop in movable
                else "its output is not dense in memory, or lies there otherwise in another batch"
            )
            big.refusals.append(f"Not compacted after {self.network.taps[big.stops[stop]]}: {reason}.")

    def _try_out(self, big: _CompactingBatch, small: _CompactingBatch, stops: Sequence[int]) -> list[int]:
        """Move samples at each of these stops, whatever the heads say; return those after which all outputs are alike.

        Other samples are in the small batch before, as far as the stop, so that nothing is there of the samples that
        come but what a move brings, and nothing that a later segment has overwritten.
        """
        moved, alike = slice(-small.size, None), []
        stream = self._captures.streams.trunk
        generator = torch.Generator(self._device).manual_seed(0)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            inputs = {batch: _at_random(batch.example, generator) for batch in (small, big)}

            def run(batch: _CompactingBatch, graphs: Sequence[Graph]) -> None:
                batch.x.copy_(inputs[batch])
                for graph in graphs:
                    graph.launch(stream)

            run(big, big.graphs)
            wanted = [y[moved].clone() for y in big.outputs]
            exit_index = big.buffers.answer(big.buffers.packed_answer)[1]
            for stop in stops:
                tap_index = big.stops[stop]
                run(small, small.graphs[: stop + 1])
                run(big, big.graphs[: stop + 1])
                exit_index.fill_(0)
                exit_index[moved] = -1
                here = torch.tensor([small.entry(tap_index)] * (big.size + 1), device=self._device)
                gather_open(big.outputs[tap_index], big.buffers, big.origin, here, big.answer.fields)
                for graph in small.graphs[stop + 1 :]:
                    graph.launch(stream)
                if all(map(_alike, small.outputs[tap_index + 1 :], wanted[tap_index + 1 :])):
                    alike.append(stop)
        return alike

    def _answer_polling(self, captured: PolledBatch, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        stream = self._begin(captured, x, caller)
        assert isinstance(captured, _CompactingBatch)
        batch, stops = captured, captured.stops
        batch.graphs[0].launch(stream)
        launched = 1
        if stops and not batch.moves[0]:
            batch.graphs[1].launch(stream)
            launched = 2
        packed, answer = batch.empty_answer()
        for stop in range(len(stops)):
            count = self._poll(batch, stop)
            if count == 0:
                break
            if launched == stop + 1:  # the host has waited for this number
                small = batch.moves[stop][count]
                if small is not None:
                    small.next_request()
                (small or batch).graphs[launched].launch(stream)
                launched += 1
                if small is not None:
                    if batch is captured:
                        packed, answer = captured.answer.empty(len(x))
                    batch = small
            if launched == stop + 2 <= len(stops) and not batch.moves[stop + 1]:
                batch.graphs[launched].launch(stream)
                launched += 1
        else:
            self._event.record(stream)
            caller.wait_event(self._event)
        if batch.collecting is not None and batch is not captured:
            batch.collecting.launch(caller)
            packed.copy_(captured.answer.packed)
        else:
            packed.copy_(captured.buffers.packed_answer)
        return answer


def _at_random(example: Tensor, generator: torch.Generator) -> Tensor:
    """Make samples like those of a batch that differ from each other, in brightness too, which outlasts pooling."""
    if example.is_floating_point():
        shape = example.shape
        brightness = torch.randn(len(example), *[1] * (len(shape) - 1), generator=generator, device=example.device)
        return torch.randn(shape, generator=generator, device=example.device) + 2 * brightness
    drawn = torch.randint(example.numel(), example.shape, generator=generator, device=example.device)
    return example.flatten()[drawn]  # indices, say: of the values that there are


def _alike(found: Tensor, wanted: Tensor) -> bool:
    """Return whether two outputs differ by rounding alone; what is not finite must be so in both."""
    finite = wanted.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return False
    exact = torch.where(finite, wanted, 0).double()
    difference = torch.where(finite, found, 0).double() - exact
    return bool(difference.abs().mean() <= _ALIKE[wanted.dtype] * exact.abs().mean())
