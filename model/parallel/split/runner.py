"""``SplitRunner``: the runner of a network split over several GPUs."""

import weakref
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from ....kernels.cuda.lifetimes import new_event
from ....kernels.cuda.runtime import beside_captures
from ...answers.exit_result import ExitResult
from ...answers.rule_order import note_reader
from ...basics.streams import CallersStream
from ...network.early_exit_network import EarlyExitNetwork
from ...runners.captured_network import CapturedNetwork
from ...runners.runner import SerialRunner
from .captured import SplitBatch
from .part import Part, free, free_or_leave, wait_for, wait_for_current_streams


class SplitRunner(SerialRunner):
    """Answers for batches by parts of a network, each on its GPU; see :func:`parallelize`, which makes it.

    Thresholds, temperatures and whether an exit is enabled may change at any time; parameters may change in place,
    followed by ``refresh``. A batch is padded to the next of the batch sizes, one above the largest is split. One
    request at a time: a call while another thread's is under way raises.
    """

    def __init__(
        self,
        network: EarlyExitNetwork,
        parts: list[Part],
        example_input: Tensor,
        captured: Mapping[int, SplitBatch],
        notes: str,
        *,
        polls: bool,
    ) -> None:
        """Run what was captured of parts, by batch size; they are this runner's from now on.

        With ``polls`` the host is told at each stop how many samples stay open, and launches no more once none is.
        """
        super().__init__(network, example_input, sorted(captured))
        self._parts, self._notes, self._polls = parts, notes, polls
        weakref.finalize(self, free_or_leave, parts).atexit = False
        used = {tensor.data_ptr() for part in parts for tensor in (*part.modules.parameters(), *part.modules.buffers())}
        self._network_then = CapturedNetwork(network, read=used)  # of parts that have copies nothing is read
        for one in captured.values():
            self._network_then.resizable |= one.resizable
        self._captures = parts[0].captures
        self._captured = self._captures.batches
        self._captured.update(captured)
        self._latest = CallersStream(torch.cuda.current_stream(self._device))
        self._began = new_event()
        heads = (*(head for part in parts for head in part.heads), *network.exit_heads)
        self._written = [*dict.fromkeys(head.rule for head in heads)]
        note_reader(self._written, self)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of each part, in the order in which a batch goes through them."""
        return tuple(part.device for part in self._parts)

    @property
    def last_reads(self) -> tuple[torch.cuda.Event, ...]:
        """The events behind the last request's reads of rules and weights."""
        self._captures.catch_up()
        return self._captures.done, *(event for part in self._parts for event in (part.computed, part.judged))

    def _answer(self, captured: SplitBatch, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        try:
            answer = captured.answer(x, caller, self._began, polls=self._polls)
        except BaseException:  # an interrupt, say: what was launched reads the batch, whose memory may go now
            with suppress(RuntimeError):  # an error would hide what has gone wrong
                self.wait_until_idle()
                for one in self._captured.values():
                    one.batch.count_requests()
            raise
        if self.network.monitor is not None:
            self._show_tallies()
        return answer

    def _show_tallies(self) -> None:
        """Let the current stream of each other device, on which a monitor is read, come after this request's counts."""
        for part in self._parts:
            if part.device != self._device:
                for event in (part.computed, part.judged):
                    torch.cuda.current_stream(part.device).wait_event(event)

    def _follow_writes(self, caller: torch.cuda.Stream) -> None:
        for part in self._parts:
            part.take_rules(self.network)
        super()._follow_writes(caller)

    def describe(self) -> str:
        """Say which part of the network is on which device, with measured times, and how it runs."""
        self._refuse_closed()
        return self._notes

    def _refresh(self) -> None:
        with beside_captures():
            wait_for(self._parts)  # no graph may read what is half copied
            for part in self._parts:
                part.refresh(self.network)
            wait_for_current_streams(self.devices)

    def wait_until_idle(self) -> None:
        """Let the host wait for all that was launched, the part of a network too that an answer did not need."""
        wait_for(self._parts)

    def _free(self) -> None:
        free(self._parts)  # first: copies may be under way to what is freed next
        super()._free()
