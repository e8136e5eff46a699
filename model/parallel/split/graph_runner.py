"""``GraphSplitRunner``: parts of a network as CUDA graphs on their GPUs, one process launching them all."""

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ....kernels.cuda_runtime import beside_captures
from ....kernels.lifetimes import new_event
from ...early_exit_network import EarlyExitNetwork
from ...exit_result import ExitResult
from ...rule_order import count_writes, note_reader, wait_for_writes
from ...runners.captured_memory import CapturedMemory
from ...runners.captures import Callers
from ...runners.checks import check_no_outer_capture
from .captured import CapturedParts
from .part import Part
from .runner import SplitRunner
from .streams import AllStreams, wait_for_current_streams


class GraphSplitRunner(SplitRunner):
    """Launches graphs on streams of each GPU, and copies between them on others; events alone order them."""

    _uses_cuda = True

    def __init__(
        self,
        network: EarlyExitNetwork,
        parts: Sequence[Part],
        example_input: Tensor,
        captured: dict[int, CapturedParts],
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
        used = {tensor.data_ptr() for part in parts for tensor in (*part.modules.parameters(), *part.modules.buffers())}
        self._memory = CapturedMemory(network, used)  # of parts that have copies nothing is read

    @property
    def last_reads(self) -> tuple[torch.cuda.Event, ...]:
        """The events behind the last request's reads of rules and weights."""
        self._captures.catch_up()
        parts = self._streams.parts
        return self._captures.done, *(event for one in parts for event in (one.computed, one.judged))

    def _request(self, x: Tensor, samples: int) -> ExitResult:
        with torch.cuda.device(self._device):
            check_no_outer_capture()
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
            self._heads.check_unchanged()  # while the devices work; earlier it would delay the answer
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
        self._memory.check_unmoved(self.network)
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
        self._memory.clear()
        super()._free()
