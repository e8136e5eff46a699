"""``SplitRunner``: the base of the runners of a network split over several devices; the one on CPUs, and on GPUs."""

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from ....kernels import HeadOutput, all_exit, decide, in_order
from ....kernels.cuda.lifetimes import new_event
from ....kernels.cuda.runtime import beside_captures
from ...answers.exit_result import ExitResult, first_sure, joined
from ...answers.rule_order import count_writes, note_reader, wait_for_writes
from ...heads.head import AuxHead
from ...network.early_exit_network import EarlyExitNetwork
from ...runners.captured_network import CapturedNetwork
from ...runners.captures import Callers
from ...runners.checks import check_no_outer_capture
from ...runners.runner import SerialRunner
from ..segments import Segment, median_ms, run_segments
from .captured import SplitBatch
from .part import AllStreams, Part, wait_for_current_streams


class SplitRunner(SerialRunner):
    """Answers for batches by parts of a network, each on its device; see :func:`parallelize`, which makes it.

    Thresholds, temperatures and whether an exit is enabled may change at any time; parameters may change in place,
    followed by ``refresh``. A batch is padded to the next of the batch sizes, one above the largest is split. One
    request at a time: a call while another thread's is under way raises.
    """

    #: Whether criteria are those that there were when it was made.
    captures_rules = True

    def __init__(
        self, network: EarlyExitNetwork, parts: Sequence[Part], example_input: Tensor, sizes: Sequence[int], notes: str
    ) -> None:
        """Answer for batches like the example by parts of a network, which have segments for each size."""
        super().__init__(network, example_input, sizes)
        self._parts = parts
        self._notes = notes
        used = {tensor.data_ptr() for part in parts for tensor in (*part.modules.parameters(), *part.modules.buffers())}
        # of parts that have copies nothing is read
        self._network_then = CapturedNetwork(network, rules=self.captures_rules, read=used)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of each part, in the order in which a batch goes through them."""
        return tuple(part.device for part in self._parts)

    def _answer_in_parts(self, x: Tensor, samples: int) -> ExitResult:
        """Answer for a batch, split where it is larger than the largest size."""
        if samples <= self._sizes[-1]:
            return self._answer_one(x, self._size_for(samples))
        results = [self._answer_one(part, self._size_for(len(part))) for part in x.split(self._sizes[-1])]
        return joined(results)

    @abstractmethod
    def _answer_one(self, x: Tensor, size: int) -> ExitResult:
        """Answer for at most ``size`` samples by what there is for that size."""

    def _is_closed(self) -> bool:
        return not self._parts

    def describe(self) -> str:
        """Say which part of the network is on which device, with measured times, and how it runs."""
        self._refuse_closed()
        return self._notes

    def _refresh(self) -> None:
        for part in self._parts:
            part.refresh(self.network)

    def _free(self) -> None:
        self._parts = ()
        self._network_then.clear()


def eager_times(segments: Sequence[Segment], heads: Sequence[AuxHead], x: Tensor) -> list[float]:
    """Measure what each segment takes with its head for a batch, in microseconds."""
    taken = [(x,), *(handed for _, handed in run_segments(segments, x))]
    return [
        1e3 * median_ms(partial(_run, segment, head, of_segment))
        for segment, head, of_segment in zip(segments, [*heads, None], taken, strict=False)
    ]


def _run(segment: Segment, head: AuxHead | None, taken: Sequence[Tensor]) -> None:
    read = segment.module(*taken)[0]
    if head is None:
        decide(read, temperature=1.0, threshold=1.0)
    else:
        head(read)


class EagerSplitRunner(SplitRunner):
    """Runs segment by segment, in the order and with the copies of the devices: what is there where no GPU is."""

    captures_rules = False

    def __init__(
        self,
        network: EarlyExitNetwork,
        parts: Sequence[Part],
        example_input: Tensor,
        sizes: Sequence[int],
        notes: str,
        *,
        stops: bool,
    ) -> None:
        """Run parts of a network; with ``stops`` no further than until all samples of a batch are answered."""
        super().__init__(network, parts, example_input, sizes, notes)
        self._stops = stops

    @torch.no_grad()
    def _request(self, x: Tensor, samples: int) -> ExitResult:
        self._network_then.check_unchanged()
        return self._answer_in_parts(x, samples)

    def _answer_one(self, x: Tensor, size: int) -> ExitResult:
        samples = len(x)
        if samples < size:  # segments take no other number
            x = torch.cat([x, x[:1].expand(size - samples, *x.shape[1:])])
        said: list[HeadOutput] = []
        handed: Sequence[Tensor] = (x,)
        for part in self._parts:
            handed = [_copied_to(part.device, each) for each in handed]
            for index, segment in enumerate(part.segments[size]):
                read, *handed = segment.module(*handed)
                if index == len(part.heads):
                    said.append(decide(read, temperature=1.0, threshold=1.0))
                    break
                said.append(part.heads[index](read))
                rule = part.heads[index].rule
                said[-1] = in_order(said, rule.threshold_tensor, rule.criterion)
                if self._stops and all_exit(said, samples):
                    return self._merged(said, samples)
        return self._merged(said, samples)

    def _merged(self, said: Sequence[HeadOutput], samples: int) -> ExitResult:
        heads = self.network.exit_heads
        answer = first_sure(said, with_probs=all(head.return_probs for head in heads))
        answer = ExitResult(None if part is None else part[:samples] for part in answer)
        if self.network.monitor is not None:
            self.network.monitor.count(answer.exit_index, answer.confidence)
        return answer


def _copied_to(device: torch.device, x: Tensor) -> Tensor:
    """Return a copy of an activation on a device, a new one there, too."""
    return torch.empty_like(x, device=device).copy_(x)


class GraphSplitRunner(SplitRunner):
    """Launches graphs on streams of each GPU, and copies between them on others; events alone order them."""

    _uses_cuda = True

    def __init__(
        self,
        network: EarlyExitNetwork,
        parts: Sequence[Part],
        example_input: Tensor,
        captured: dict[int, SplitBatch],
        streams: AllStreams,
        notes: str,
        *,
        polls: bool,
    ) -> None:
        """Run what was captured, by batch size; the streams are this runner's from now on.

        With ``polls`` the host is told at each stop how many samples stay open, and launches no more once none is.
        """
        super().__init__(network, parts, example_input, sorted(captured), notes)
        self._captured, self._streams, self._polls = captured, streams, polls
        weakref.finalize(self, streams.free_or_leave).atexit = False
        self._captures = streams.parts[0].captures
        self._captures.batches.update((size, one.batch) for size, one in captured.items())
        self._callers = Callers(self._captures)
        self._began = new_event()
        shared = [rule for part in parts for rule in part.rules]
        self._rules = [*dict.fromkeys([*shared, *(head.rule for head in network.exit_heads)])]
        note_reader(self._rules, self)
        self._seen_writes = -1
        for one in captured.values():
            self._network_then.resizable |= one.resizable

    @property
    def last_reads(self) -> tuple[torch.cuda.Event, ...]:
        """The events behind the last request's reads of rules and weights."""
        self._captures.catch_up()
        parts = self._streams.parts
        return self._captures.done, *(event for one in parts for event in (one.computed, one.judged))

    def _request(self, x: Tensor, samples: int) -> ExitResult:
        with torch.cuda.device(self._device):
            check_no_outer_capture()
            self._network_then.check_not_resized()
            caller = self._callers.current()
            self._follow_rules(caller)
            try:
                self._captures.asking = caller
                with beside_captures():  # PyTorch's allocator may have to ask the device for the answer's memory
                    answer = self._answer_in_parts(x, samples)
            except BaseException:  # an interrupt, say: what was launched reads the batch, whose memory may go now
                with suppress(RuntimeError):  # an error would hide what has gone wrong
                    self._streams.wait()
                    for captured in self._captured.values():
                        captured.batch.count_requests()
                raise
            finally:
                self._captures.record(caller)
            if self.network.monitor is not None:
                self._show_tallies()
            self._network_then.check_unchanged()  # while the devices work; earlier it would delay the answer
            return answer

    def _answer_one(self, x: Tensor, size: int) -> ExitResult:
        captured = self._captured[size]
        answer = captured.answer_polling if self._polls else captured.answer
        return answer(x, self._callers.latest, self._began)

    def _show_tallies(self) -> None:
        """Let the current stream of each other device, on which a monitor is read, come after this request's counts."""
        for one in self._streams.parts:
            if one.device != self._device:
                for event in (one.computed, one.judged):
                    torch.cuda.current_stream(one.device).wait_event(event)

    def _follow_rules(self, caller: torch.cuda.Stream) -> None:
        """Let the devices read rules with the values that were assigned last."""
        if self._seen_writes == count_writes():
            return
        for part, streams in zip(self._parts, self._streams.parts, strict=True):
            with torch.cuda.stream(streams.trunk):  # all of the part's work comes behind it
                part.take_rules(self.network)
        self._seen_writes = count_writes()
        wait_for_writes(self._rules, caller)

    def _refresh(self) -> None:
        self._network_then.check_unmoved(self.network)
        with torch.cuda.device(self._device), beside_captures():
            check_no_outer_capture()
            self._streams.wait()  # no graph may read what is half copied
            super()._refresh()
            wait_for_current_streams(self.devices)

    def wait_until_idle(self) -> None:
        """Let the host wait for all that was launched, the part of a network too that an answer did not need."""
        self._streams.wait()

    def _free(self) -> None:
        self._streams.free()  # first: copies may be under way to what is freed next
        self._captured.clear()
        self._rules.clear()
        super()._free()
