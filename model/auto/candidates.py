"""The runners that a planner chooses from, simplest first."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from ..runners.compacting import CompactingRunner
from ..runners.gated import GatedRunner
from ..runners.graph_runner import GraphRunner
from ..runners.overlapped import OverlappedRunner, fork_choices
from ..runners.polled import PolledRunner
from ..trunk.trunk import Trunk


class Candidate(NamedTuple):
    """One way to run a network, in the terms of :func:`make_runner`."""

    exits: str
    """"overlapped", "polled" or "gated"."""
    forks: tuple[str, ...] = ()
    compact: bool = False
    trunk: str = "as_is"
    """Kind of trunk that it runs on."""

    @property
    def name(self) -> str:
        """Name in reports and plans."""
        return self.runner if self.trunk == "as_is" else f"{self.runner} on {self.trunk}"

    @property
    def runner(self) -> str:
        """Name but for the trunk."""
        if self.exits == "overlapped":
            count = len(self.forks)
            return f"overlapped ({count} fork{'s' if count > 1 else ''})" if count else "serial"
        return self.exits + (" (compact)" if self.compact else "")

    def make(
        self, network: EarlyExitNetwork, example_input: Tensor, size: int, smaller: Sequence[int], trunk: Trunk
    ) -> GraphRunner:
        """Make the runner for a batch size, on a trunk of its kind; samples may be gathered into the smaller ones."""
        if self.exits == "overlapped":
            return OverlappedRunner(network, example_input, batch_sizes=(size,), trunk=trunk, forks=self.forks)
        if self.exits == "gated":
            return GatedRunner(network, example_input, batch_sizes=(size,), trunk=trunk)
        if self.compact:
            return CompactingRunner(network, example_input, batch_sizes=(*smaller, size), trunk=trunk)
        return PolledRunner(network, example_input, batch_sizes=(size,), trunk=trunk)


def candidates(taps: Sequence[str], forks: Sequence[str], smaller: Sequence[int], trunk: str) -> list[Candidate]:
    """Return for one kind of trunk what a planner chooses from: of two that are equally fast, the one that comes first.

    The last of ``forks``, at which heads leave the trunk by rule, is the last one where it may pay; samples may be
    gathered into ``smaller`` batch sizes.
    """
    choices = fork_choices(taps.index(forks[-1])) if forks else []
    return [
        Candidate("overlapped", trunk=trunk),  # serial: all heads behind the trunk
        *(Candidate("overlapped", tuple(taps[index] for index in choice), trunk=trunk) for choice in choices),
        Candidate("polled", trunk=trunk),
        Candidate("gated", trunk=trunk),
        *([Candidate("polled", compact=True, trunk=trunk)] if smaller else []),
    ]
