"""``OverlappedRunner``: the whole network in one CUDA graph, heads beside the trunk."""

from collections.abc import Callable, Sequence

from torch import Tensor

from ...kernels import ExitBuffers
from ..listening.taps import list_taps
from ..network.early_exit_network import EarlyExitNetwork
from ..trunk.trunk import Trunk
from .graph_runner import GraphRunner
from .program import CapturedBatch, HeadLaunches

#: By rule the launch beside the trunk starts while at least this share of the trunk's time is left to hide it.
_SHARE_TO_HIDE_BEHIND = 0.2


class OverlappedRunner(GraphRunner):
    """Computes every head, beside the trunk: one graph a batch size, no work skipped.

    Heads share launches, because every fork of the graph delays the trunk. Those whose taps come late, with too little
    of the trunk left to hide behind, run with the classifier in one launch at the end; the others on a low-priority
    stream beside the trunk.
    """

    def __init__(
        self,
        network: EarlyExitNetwork,
        example_input: Tensor,
        *,
        batch_sizes: Sequence[int] = (1,),
        trunk: str | Trunk = "as_is",
        forks: Sequence[str] | None = None,
    ) -> None:
        """Capture ``network``; see :class:`GraphRunner` for the arguments that all runners have.

        ``forks`` are taps after which a launch leaves the trunk, with all heads since the one before; heads behind the
        last run with the classifier. ``()`` is no overlap: all heads in one launch at the end. None is by rule, from
        the times of the segments.
        """
        self._forks = None if forks is None else _indices_of(forks, network.taps)
        self.forks: dict[int, tuple[str, ...]] = {}
        """By batch size, the taps after which a launch leaves the trunk."""
        super().__init__(network, example_input, batch_sizes=batch_sizes, trunk=trunk)

    def _choose_forks(self, example: Tensor) -> list[int]:
        """Return the last tap of each launch beside the trunk, by index."""
        forks = self._forks
        if forks is None:
            forks = forks_by_rule(self._segment_times(example))
        self.forks[len(example)] = tuple(self.network.taps[index] for index in forks)
        return forks

    def _capture(self, example: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        streams, taps = self._captures.streams, self.network.taps
        forks = self._choose_forks(example)
        static = self._static(example)
        launches = HeadLaunches(buffers, self._exits, self.network.exit_heads, forks)
        self._compile(static, launches)

        def forward(_cut: Callable[[], None]) -> None:
            def at_fork(fork: int, outputs: list[Tensor]) -> None:
                launches.launch_beside(fork, outputs, streams.side)

            outputs = self._run_trunk(static.read, forks, at_fork)
            if forks:
                streams.trunk.wait_stream(streams.side)
            launches.launch(len(forks), outputs)

        program = self._capture_program(forward, static, self._captures.memory)
        description = f"one graph; heads beside the trunk after {list_taps(forks, taps)}"
        if late := range(forks[-1] + 1 if forks else 0, len(taps)):
            description += f"; with the classifier those of {list_taps(late, taps)}"
        return CapturedBatch(static, buffers, launches.launches, program.graphs, description + ".")


def _indices_of(forks: Sequence[str], taps: Sequence[str]) -> list[int]:
    """Return the indices of the taps at which to fork."""
    if isinstance(forks, str) or not isinstance(forks, Sequence):
        raise TypeError(f"forks: got {forks!r}, wants a sequence of taps, or None")
    for tap in forks:
        if tap not in taps:
            raise ValueError(f"forks: got {tap!r}, wants taps of the network: {', '.join(taps)}")
    return [index for index, tap in enumerate(taps) if tap in forks]


def fork_choices(last: int) -> list[list[int]]:
    """Return choices of taps, by index, to fork after: ``last``, every other one up to it, and each up to it."""
    choices = ([last], list(range(last % 2, last + 1, 2)), list(range(last + 1)))
    return [choice for i, choice in enumerate(choices) if choice not in choices[:i]]


def forks_by_rule(segment_us: Sequence[float]) -> list[int]:
    """Choose the tap, by index, at which heads leave the trunk, all heads so far in one launch: the last that can hide.

    Heads that start earlier find idle multiprocessors, but each fork costs the trunk a microsecond, and what runs
    beside it takes bandwidth: with one fork in place of two or three ResNet-18 and its eight heads took 0.2 to 1.3 %
    less (batches of 1 to 32, 10 and 1,000 classes, H200, in no record), and of 128 samples each further one costs more.
    """
    left = [sum(segment_us[index + 1 :]) for index in range(len(segment_us) - 1)]
    hidden = [index for index, us in enumerate(left) if us >= _SHARE_TO_HIDE_BEHIND * sum(segment_us)]
    return hidden[-1:]
