"""The runners that a planner chooses from, simplest first."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from ..runners.compacting import CompactingRunner
from ..runners.gated import GatedRunner
from ..runners.overlapped import OverlappedRunner, fork_choices
from ..runners.polled import PolledRunner
from ..runners.runner import Runner
from ..trunk.trunk import Trunk


class Candidate(NamedTuple):
    """One way to run a network, in the terms of :func:`make_runner`."""

    exits: str
    """"overlapped", "polled" or "gated"."""
    forks: tuple[str, ...] = ()
    compact: bool = False

    @property
    def name(self) -> str:
        """Name in reports and plans."""
        if self.exits == "overlapped":
            count = len(self.forks)
            return f"overlapped ({count} fork{'s' if count > 1 else ''})" if count else "serial"
        return self.exits + (" (compact)" if self.compact else "")

    def make(
        self, network: EarlyExitNetwork, example_input: Tensor, size: int, smaller: Sequence[int], trunk: str | Trunk
    ) -> Runner:
        """Make the runner for a batch size; samples may be gathered into the smaller ones. See :class:`GraphRunner`."""
        if self.exits == "overlapped":
            return OverlappedRunner(network, example_input, batch_sizes=(size,), trunk=trunk, forks=self.forks)
        if self.exits == "gated":
            return GatedRunner(network, example_input, batch_sizes=(size,), trunk=trunk)
        if self.compact:
            return CompactingRunner(network, example_input, batch_sizes=(*smaller, size), trunk=trunk)
        return PolledRunner(network, example_input, batch_sizes=(size,), trunk=trunk)


def candidates(taps: Sequence[str], forks: Sequence[str], smaller: Sequence[int]) -> list[Candidate]:
    """Return what a planner chooses from: of two that are equally fast, the one that comes first.

    The last of ``forks``, at which heads leave the trunk by rule, is the last one where it may pay; samples may be
    gathered into ``smaller`` batch sizes.
    """
    choices = fork_choices(taps.index(forks[-1])) if forks else []
    return [
        Candidate("overlapped"),  # serial: all heads behind the trunk
        *(Candidate("overlapped", tuple(taps[index] for index in choice)) for choice in choices),
        Candidate("polled"),
        Candidate("gated"),
        *([Candidate("polled", compact=True)] if smaller else []),
    ]
