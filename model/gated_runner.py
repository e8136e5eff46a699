"""The gated runner: one CUDA graph with nested conditional nodes, which the heads themselves open or leave shut."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels import ExitBuffers, ExitLaunch
from .capture import Capture, Graph, warm_up
from .graph_runner import CapturedBatch, GraphRunner
from .taps import listening

if TYPE_CHECKING:
    from .early_exit_network import EarlyExitNetwork


class _Gated(CapturedBatch):
    def __init__(
        self,
        x: Tensor,
        buffers: ExitBuffers,
        launches: Sequence[ExitLaunch],
        graphs: Sequence[Graph],
        conditions: Tensor,
    ) -> None:
        super().__init__(x, buffers, launches, graphs)
        self._conditions = conditions  # the graph reads them


class GatedRunner(GraphRunner):
    """Stops the network on the GPU alone; the host launches one graph and need not wait.

    With ``lag`` 0 head k decides whether segment k + 1 runs, which waits for it. With ``lag`` 1 head k runs beside
    segment k + 1 and decides whether segment k + 2 runs: the head is hidden, and an exit runs one segment more.
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
            lag: 0 or 1, segments between a head and what it decides about.
        """
        if lag not in (0, 1):
            raise ValueError(f"lag: got {lag!r}, wants 0 or 1")
        self.lag = lag
        super().__init__(network, example_input, batch_sizes=batch_sizes, trunk=trunk)

    def _capture(self, x: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        heads = len(self._heads)
        conditions = torch.zeros(heads, dtype=torch.int64, device=self._device)
        gates = heads if self.lag == 0 else heads - 1
        launches = [
            ExitLaunch(buffers, place, [head], condition=conditions[place : place + 1] if place < gates else None)
            for place, head in enumerate(self._heads)
        ]
        last_launch = ExitLaunch(buffers, heads, self._places[-1:])
        levels = self._capture_streams.levels(gates + 1)

        def forward(capture: Capture | None) -> None:
            held: list[Tensor] = []
            level = 0

            def run_if_open_after(place: int) -> None:
                """Put the rest of the forward into the body of a node that the head at ``place`` opens."""
                nonlocal level
                if capture is not None:
                    level += 1
                    capture.open_body(place, levels[level][0])

            def on_tap(place: int, features: Tensor) -> None:
                held.append(features)
                if self.lag == 0:
                    launches[place]([features])
                    run_if_open_after(place)
                    return
                if place > 0:
                    join()
                    run_if_open_after(place - 1)
                trunk, side = levels[level]
                side.wait_stream(trunk)
                with torch.cuda.stream(side):
                    launches[place]([features])

            def join() -> None:
                trunk, side = levels[level]
                trunk.wait_stream(side)

            with listening(self._trunk.module, self.network.taps, on_tap):
                final = self._trunk.module(x)
            if self.lag == 1:
                join()
            last_launch([final])

        warm_up(lambda: forward(None), levels[0][0])
        capture = Capture(self._device, self._pool)
        with capture.capturing(self._trunk.module, levels[0][0]):
            forward(capture)
        for place, handle in capture.handles.items():
            conditions[place] = handle
        return _Gated(x, buffers, [*launches, last_launch], capture.graphs, conditions)
