"""``CompiledBackbone``: a backbone alone, through Inductor and in a CUDA graph, which plans are compared with."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...kernels.cuda.runtime import beside_captures
from ..runners.capture import CAPTURE_LOCK
from ..runners.captures import Captures
from ..runners.graph_runner import GraphRunner
from ..runners.program import StaticInput, capture_program

#: Its name among runners.
COMPILED = "torch.compile"


class CompiledBackbone:
    """What ``torch.compile`` makes of a backbone without heads, called as a runner is; it returns the logits."""

    def __init__(self, forward: Callable[[Tensor], Tensor], backbone: nn.Module, example: Tensor) -> None:
        """Capture a forward of the backbone, compiled before or at its first call, for batches like the example.

        Raises:
            RuntimeError: it cannot be compiled or captured.
        """
        device = example.device
        with (
            CAPTURE_LOCK, beside_captures(), torch.cuda.device(device), torch.inference_mode(False), torch.no_grad(),
        ):  # fmt: skip
            self._captures = Captures(device, GraphRunner.trunk_priority)
            try:
                self._static = static = StaticInput(example)
                streams, memory = self._captures.streams, self._captures.memory
                program = capture_program(
                    lambda _cut: forward(static.read), static, [static.x], streams.trunk, memory, [backbone]
                )
                (self._graph,), self._logits = program.graphs, program.result
            except BaseException:
                self._captures.free()
                raise

    def __call__(self, x: Tensor) -> Tensor:
        """Return a copy of the logits for a batch, on the current stream."""
        stream = torch.cuda.current_stream(x.device)
        self._static.x.copy_(x)
        self._graph.launch(stream)
        self._captures.record(stream)
        return self._logits.clone()

    def wait_until_idle(self) -> None:
        """Let the host wait for what was launched."""
        self._captures.wait()

    def close(self) -> None:
        """Wait, and free all."""
        del self._graph, self._logits, self._static
        self._captures.free()
