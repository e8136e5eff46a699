"""The gated runner: one CUDA graph with nested conditional nodes, which the heads themselves open or leave shut."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import ExitBuffers, ExitLaunch
from ..early_exit_network import EarlyExitNetwork
from ..taps import listening
from ..trunk.trunk import Trunk
from .capture import Capture, nested, warm_up
from .captured_batch import CapturedBatch
from .graph_runner import GraphRunner, listed

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
        network: EarlyExitNetwork,
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str | Trunk = "as_is",
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
        gates = max(len(stops) - self.lag, 0)
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
        trunk, side = self._capture_streams.pair

        def forward(capture: Capture | None) -> None:
            held: list[Tensor] = []

            def cut() -> None:
                if capture is not None:
                    capture.cut()

            def on_tap(place: int, features: Tensor) -> None:
                held.append(features)
                if place not in stops:
                    return
                gate = stops.index(place)
                if self.lag == 0:
                    launches[gate](held[starts[gate] :])
                    cut()
                    return
                if gate > 0:
                    trunk.wait_stream(side)
                    cut()
                side.wait_stream(trunk)
                with torch.cuda.stream(side):
                    launches[gate](held[starts[gate] :])

            with listening(self._trunk.module, self.network.taps, on_tap):
                final = self._trunk.module(x)
            if self.lag == 1 and stops:
                trunk.wait_stream(side)
            last_launch([*held[starts[-1] :], final])

        warm_up(lambda: forward(None), trunk)
        capture = Capture(self._device, self._pool)
        with capture.capturing(self._trunk.module, trunk):
            forward(capture)
        graph, handles = nested(capture.graphs)
        conditions[:gates] = torch.tensor(handles, dtype=torch.int64)
        after = listed(stops[self.lag :], self.network.taps) or "no tap"
        launches.append(last_launch)
        return CapturedBatch(x, buffers, launches, [graph], f"one graph, gated after {after}.")
