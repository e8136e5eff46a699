"""``StageGraph``: what a stage computes for a micro-batch, captured as a CUDA graph, launched without a wait."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....kernels.cuda.lifetimes import new_event
from ....kernels.cuda.runtime import beside_captures
from ...answers.exit_rule import ExitRule
from ...answers.rule_order import note_reader, wait_for_writes
from ...runners.capture import CAPTURE_LOCK
from ...runners.captures import Captures
from ...runners.program import capture_program
from ...trunk.trunk import Trunk

#: The lowest: what sends and receives, which a later stage waits for, is placed before a stage's waiting blocks.
_PRIORITY = 0

#: From the state of samples, what a stage takes and a side stream for its exits, to what these say (see
#: ``ExitDecisions``), and what it hands over.
Compute = Callable[[Tensor, Sequence[Tensor], torch.cuda.Stream], tuple[Tensor, tuple[Tensor, ...]]]


class UnderWay(NamedTuple):
    """Events of what a device computes for a micro-batch."""

    begun: torch.cuda.Event
    """Behind what it waits for."""
    done: torch.cuda.Event


class Computed(NamedTuple):
    """What was computed, or is being computed, for a micro-batch."""

    said: Tensor
    """See ``ExitDecisions``; on the CPU, to be read once all is done."""
    handed: tuple[Tensor, ...]
    """On the device, for streams that wait until all is done."""
    under_way: UnderWay | None = None
    """None if all is done."""

    @property
    def is_done(self) -> bool:
        """Whether all is computed."""
        return self.under_way is None or self.under_way.done.query()


@contextmanager
def beside(side: torch.cuda.Stream | None) -> Iterator[None]:
    """Run what is inside on a side stream, behind what is on the current one so far; None: on the current one."""
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        yield


class StageGraph:
    """Calls a stage's computation by launching its graph on a stream of its own, beside what sends and receives."""

    def __init__(
        self,
        compute: Compute,
        module: nn.Module,
        rules: Sequence[ExitRule],
        trunk: Trunk,
        state: Tensor,
        example: Sequence[Tensor],
    ) -> None:
        """Capture ``compute``, with memory that ``module`` has, for a state and tensors like the example's.

        What is read is written to in order: the ``rules``, and the weights of the ``trunk`` that ``compute`` is of.
        """
        device = example[0].device
        self._rules, self._written = rules, [*rules, trunk.module]
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
                self._state = state.to(device)
                self._taken = [each.clone(memory_format=torch.preserve_format) for each in example]
                with trunk.choosing(len(state)):
                    program = capture_program(
                        lambda _cut: compute(self._state, self._taken, side), None, [self._state, *self._taken],
                        stream, self._captures.memory, [module],
                    )  # fmt: skip
                (self._graph,), (self._said, self._handed), self.resizable = program
                self._captures.record(stream)
            except BaseException:
                self._captures.free()
                raise

    @property
    def last_reads(self) -> tuple[torch.cuda.Event, ...]:
        """The event behind the last launch, which reads rules."""
        return (self._captures.done,)

    def __call__(self, state: Tensor | None, taken: Sequence[Tensor]) -> Computed:
        """Launch, behind what is on the current stream.

        Args:
            state: on any device; None if it is as it was captured.
            taken: tensors as they were captured, or, of the first stage, samples to fill them with, on any device. They
                must not change before all is done.
        """
        if [rule.criterion for rule in self._rules] != self._criteria:
            raise RuntimeError(f"network: its heads were captured with the criteria {', '.join(self._criteria)}")
        current, stream = torch.cuda.current_stream(self._captures.device), self._stream
        with beside_captures():  # PyTorch's allocator may have to ask the device for memory
            # The current stream's, which waits until all is done before it hands them on, and so before they are freed.
            handed = tuple(torch.empty_like(each) for each in self._handed)
        stream.wait_stream(current)
        wait_for_writes(self._written, stream)
        events = UnderWay(new_event(), new_event())
        events.begun.record(stream)
        with beside_captures(), torch.cuda.stream(stream):
            if state is not None:
                self._state.copy_(state, non_blocking=True)
            for into, each in zip(self._taken, taken, strict=True):
                if len(each) == len(into):
                    into.copy_(each, non_blocking=True)
                else:
                    into[: len(each)].copy_(each, non_blocking=True)
                    into[len(each) :] = each[:1]
            self._graph.launch(stream)
            for into, each in zip(handed, self._handed, strict=True):
                into.copy_(each, non_blocking=True)
            said = torch.empty_like(self._said, device="cpu", pin_memory=True)
            said.copy_(self._said, non_blocking=True)
            events.done.record(stream)
        self._captures.record(stream)
        return Computed(said, handed, events)

    def close(self) -> None:
        """Free the graph; closing twice is fine."""
        self._captures.free()
