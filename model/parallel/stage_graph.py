"""``StageGraph``: what a stage computes for a micro-batch, captured as a CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...kernels.cuda_runtime import beside_captures
from ..exit_rule import ExitRule
from ..rule_order import note_reader, wait_for_writes
from ..runners.capture import CAPTURE_LOCK, Capture, warm_up
from ..runners.captures import Captures

#: The one that a trunk's graphs have: see GraphRunner.
_PRIORITY = -1

#: From what a stage takes to what its exits say, packed, and what it hands over.
Compute = Callable[[Sequence[Tensor]], tuple[Tensor, tuple[Tensor, ...]]]


class StageGraph:
    """Calls a stage's computation by launching its graph; takes and returns what the computation does."""

    def __init__(
        self, compute: Compute, module: nn.Module, rules: Sequence[ExitRule], example: Sequence[Tensor]
    ) -> None:
        """Capture ``compute``, with memory that ``module`` has, for tensors like the example's, on their device."""
        device = example[0].device
        self._rules = rules
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
                note_reader(rules, self)
                wait_for_writes(rules, torch.cuda.current_stream(device))
                stream = self._captures.streams.trunk
                self._captures.streams.allocate_workspaces(stream)
                self._taken = [each.clone(memory_format=torch.preserve_format) for each in example]
                warm_up(lambda: compute(self._taken), lambda: None, stream)
                capture = Capture(device, self._captures.memory)
                with capture.capturing(stream, module):
                    self._returned = compute(self._taken)
                [self._graph] = capture.graphs
                self._captures.record(torch.cuda.current_stream(device))
            except BaseException:
                self._captures.free()
                raise

    @property
    def last_reads(self) -> tuple[torch.cuda.Event, ...]:
        """The event behind the last launch, which reads rules."""
        return (self._captures.done,)

    def __call__(self, taken: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute on the current stream; what is returned is the caller's."""
        if [rule.criterion for rule in self._rules] != self._criteria:
            raise RuntimeError(f"network: its heads were captured with the criteria {', '.join(self._criteria)}")
        stream = torch.cuda.current_stream(self._captures.device)
        wait_for_writes(self._rules, stream)
        with beside_captures():  # PyTorch's allocator may have to ask the device for memory
            for into, each in zip(self._taken, taken, strict=True):
                into.copy_(each)
            self._graph.launch(stream)
            said, handed = self._returned
            copies = said.clone(), tuple(each.clone(memory_format=torch.preserve_format) for each in handed)
        self._captures.record(stream)
        return copies

    def close(self) -> None:
        """Free the graph; closing twice is fine."""
        self._captures.free()
