"""The gated runner: one CUDA graph with nested conditional nodes, which the heads themselves open or leave shut."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import ExitBuffers, ExitLaunch
from .capture import Capture, warm_up
from .graph_runner import CapturedBatch, GraphRunner, listed
from .taps import listening

if TYPE_CHECKING:
    from .early_exit_network import EarlyExitNetwork


#: A gate skips at least this much of the trunk, in microseconds: each costs about 10 even if it stays open (H200).
_LEAST_GATED_US = 20.0


class GatedRunner(GraphRunner):
    """Stops the network on the GPU alone; the host launches one graph and need not wait.

    There is a gate at every tap that is followed by enough of the trunk; other heads share the launch of the next gate.
    With ``lag`` 0 the trunk after a gate waits for its heads. With ``lag`` 1 the heads run beside the trunk and decide
    about the gate after theirs: they are hidden, and an exit runs one segment more.
    """

    def __init__(
        self,
        network: "EarlyExitNetwork",
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str = "as_is",
        lag: int = 0,
    ) -> None:
        """Capture ``network``; see :class:`GraphRunner`.

        Args:
            network: see :class:`GraphRunner`.
            example_input: see :class:`GraphRunner`.
            batch_sizes: see :class:`GraphRunner`.
            trunk: see :class:`GraphRunner`.
            lag: 0 or 1, gates between a head and what it decides about.
        """
        if lag not in (0, 1):
            raise ValueError(f"lag: got {lag!r}, wants 0 or 1")
        self.lag = lag
        super().__init__(network, example_input, batch_sizes=batch_sizes, trunk=trunk)

    def _capture(self, x: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        stops = self._stops(x, _LEAST_GATED_US)
        starts = [0, *(stop + 1 for stop in stops)]
        gates = len(stops) - self.lag
        conditions = torch.zeros(len(stops), dtype=torch.int64, device=self._device)
        launches = [
            ExitLaunch(
                buffers,
                start,
                self._places[start : stop + 1],
                condition=conditions[gate : gate + 1] if gate < gates else None,
            )
            for gate, (start, stop) in enumerate(zip(starts, stops, strict=False))
        ]
        last_launch = ExitLaunch(buffers, starts[-1], self._places[starts[-1] :])
        levels = self._capture_streams.levels(max(gates, 0) + 1)

        def forward(capture: Capture | None) -> None:
            held: list[Tensor] = []
            level = 0

            def join() -> None:
                trunk, side = levels[level]
                trunk.wait_stream(side)

            def run_if_open_after(gate: int) -> None:
                """Put the rest of the forward into the body of a node that the launch of a gate opens."""
                nonlocal level
                if capture is not None:
                    level += 1
                    capture.open_body(gate, levels[level].trunk)

            def on_tap(place: int, features: Tensor) -> None:
                held.append(features)
                if place not in stops:
                    return
                gate = stops.index(place)
                if self.lag == 0:
                    launches[gate](held[starts[gate] :])
                    run_if_open_after(gate)
                    return
                if gate > 0:
                    join()
                    run_if_open_after(gate - 1)
                trunk, side = levels[level]
                side.wait_stream(trunk)
                with torch.cuda.stream(side):
                    launches[gate](held[starts[gate] :])

            with listening(self._trunk.module, self.network.taps, on_tap):
                final = self._trunk.module(x)
            if self.lag == 1 and stops:
                join()
            last_launch([*held[starts[-1] :], final])

        warm_up(lambda: forward(None), levels[0].trunk)
        capture = Capture(self._device, self._pool)
        with capture.capturing(self._trunk.module, levels[0].trunk):
            forward(capture)
        for gate, handle in capture.handles.items():
            conditions[gate] = handle
        after = listed(stops[self.lag :], self.network.taps) or "no tap"
        launches.append(last_launch)
        return CapturedBatch(x, buffers, launches, capture.graphs, f"one graph, gated after {after}.")
