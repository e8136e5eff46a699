"""``StageGraph``: what a stage computes for a micro-batch, captured as a CUDA graph, launched without a wait."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....kernels.cuda.lifetimes import new_event
from ....kernels.cuda.runtime import beside_captures
from ...answers.exit_rule import ExitRule
from ...answers.rule_order import note_reader, wait_for_writes
from ...runners.capture import CAPTURE_LOCK, copy_between
from ...runners.captures import Captures
from ...runners.program import capture_program
from ...trunk.trunk import Trunk
from .wire import Wire

#: The lowest: what sends and receives, which a later stage waits for, is placed before a stage's waiting blocks.
_PRIORITY = 0

#: From what a stage takes, and a side stream for its exits, to what it hands over.
Compute = Callable[[Tensor, torch.cuda.Stream], Sequence[Tensor]]


class UnderWay(NamedTuple):
    """What a device computes for a micro-batch."""

    handed: Tensor
    """As it is sent, on the device, for streams that wait until all is done."""
    begun: torch.cuda.Event
    """Behind what it waits for."""
    done: torch.cuda.Event


class StageGraph:
    """Calls a stage's computation by launching its graph on a stream of its own, beside what sends and receives."""

    def __init__(
        self,
        compute: Compute,
        modules: nn.Module,
        rules: Sequence[ExitRule],
        trunk: Trunk,
        example: Tensor,
        hands: Wire,
        samples: int,
    ) -> None:
        """Capture ``compute``, with memory that ``modules`` have, for tensors like the example, of so many samples.

        What is read is written to in order: the ``rules``, and the weights of the ``trunk`` that ``compute`` is of.
        """
        device = example.device
        self._rules, self._written, self._hands = rules, [*rules, trunk.module], hands
        self._criteria = [rule.criterion for rule in rules]
        with (
            CAPTURE_LOCK,
            beside_captures(),
            torch.cuda.device(device),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            self._captures = Captures(device, _PRIORITY)
            try:
                note_reader(self._written, self)
                wait_for_writes(self._written, torch.cuda.current_stream(device))
                self._stream = stream = self._captures.streams.trunk
                side = self._captures.streams.side
                self._captures.streams.allocate_workspaces(side)  # heads may be modules, which call cuBLAS
                self._taken = taken = example.clone(memory_format=torch.preserve_format)
                with trunk.choosing(samples):
                    program = capture_program(
                        lambda _cut: compute(taken, side), None, [taken], stream, self._captures.memory, [modules]
                    )
                (self._graph,), self._handed, self.resizable = program.graphs, program.result, program.resizable
                self._captures.record(stream)
            except BaseException:
                self._captures.free()
                raise

    @property
    def last_reads(self) -> tuple[torch.cuda.Event, ...]:
        """The event behind the last launch, which reads rules."""
        return (self._captures.done,)

    def __call__(self, taken: Tensor) -> UnderWay:
        """Launch, behind what is on the current stream.

        Args:
            taken: as it was captured, or, of the first stage, samples to fill it with, on any device. It must not
                change before all is done.
        """
        if [rule.criterion for rule in self._rules] != self._criteria:
            raise RuntimeError(f"network: its heads were captured with the criteria {', '.join(self._criteria)}")
        current, stream = torch.cuda.current_stream(self._captures.device), self._stream
        with beside_captures():  # PyTorch's allocator may have to ask the device for memory
            # The current stream's, which waits until all is done before it hands it on, and so before it is freed.
            handed = self._hands.empty(self._captures.device)
            under_way = UnderWay(handed, new_event(), new_event())
            stream.wait_stream(current)
            wait_for_writes(self._written, stream)
            under_way.begun.record(stream)
            if (
                taken.shape == self._taken.shape
                and taken.stride() == self._taken.stride()
                and taken.device == self._taken.device
                and not taken.is_neg()  # nor conjugate: the memory holds something else then
                and not taken.is_conj()
            ):
                copy_between(self._taken, taken, stream)
            else:
                with torch.cuda.stream(stream):
                    self._taken[: len(taken)].copy_(taken, non_blocking=True)
                    self._taken[len(taken) :] = self._taken[:1]
            self._graph.launch(stream)
            self._hands.fill(handed, self._handed, stream)
            under_way.done.record(stream)
        self._captures.record(stream)
        return under_way

    def close(self) -> None:
        """Free the graph; closing twice is fine."""
        self._captures.free()
