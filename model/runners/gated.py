"""``GatedRunner``: one CUDA graph with nested conditional nodes, which the heads themselves open or leave shut."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels import ExitBuffers
from ..listening.taps import list_taps
from .capture import nest_in_conditions
from .graph_runner import GraphRunner
from .program import CapturedBatch, HeadLaunches
from .segment_times import choose_stops

#: A gate costs about so much, in microseconds, even if it stays open, and skips at least so much of the trunk (H200).
_GATE_US, _LEAST_GATED_US = 10.0, 21.0


class GatedRunner(GraphRunner):
    """Stops the network on the GPU alone; the host launches one graph and need not wait.

    There is a gate at every tap that is followed by enough of the trunk, or where it is known where samples leave, at
    those that pay; other heads share the launch of the next gate. The trunk after a gate waits for its heads.
    """

    def _capture(self, example: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        stops = choose_stops(self._segment_times(example), _LEAST_GATED_US, _GATE_US, self._shares_done(len(example)))
        static = self._static(example)
        conditions = torch.zeros(len(stops), dtype=torch.int64, device=self._device)
        launches = HeadLaunches(buffers, self._exits, self.network.exit_heads, stops, conditions=conditions)
        self._compile(static, launches)

        def forward(cut: Callable[[], None]) -> None:
            def at_stop(gate: int, outputs: list[Tensor]) -> None:
                launches.launch(gate, outputs)
                cut()

            outputs = self._run_trunk(static.read, stops, at_stop)
            launches.launch(len(stops), outputs)

        program = self._capture_program(forward, static, self._captures.memory)
        graph, handles = nest_in_conditions(program.graphs)
        conditions.copy_(torch.tensor(handles, dtype=torch.int64))
        description = f"one graph, gated after {list_taps(stops, self.network.taps)}."
        return CapturedBatch(static, buffers, launches.launches, [graph], description)
