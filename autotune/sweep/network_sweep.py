"""The sweep of a whole network: where its launches leave the trunk, and whether that goes first, with tuned heads."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ...kernels.head_shape import HeadShape
from ...kernels.launch_config import LaunchConfig
from ..heads.forks import NetworkPoint, network_points
from ..measuring.cells import Cell
from ..measuring.failures import Failure
from ..measuring.targets import Target
from ..measuring.timers import CAPTURES, FINAL_ROUNDS
from ..records.comparison import Difference, Paired, compare_runs, winner
from .records import Book
from .space import text


class Measurer(Protocol):
    """Measures whole networks."""

    @property
    def by_rule(self) -> NetworkPoint:
        """What a runner does unless it is told otherwise."""
        ...

    def points(
        self, points: Sequence[NetworkPoint], heads: Mapping[HeadShape, LaunchConfig], rounds: int, captures: int
    ) -> Mapping[NetworkPoint, Paired | Failure]:
        """Compile, check and time, each in fresh captures and all in the same rounds; the first is the baseline."""
        ...


class NetworkOutcome(NamedTuple):
    """What was found for one network."""

    cell: Cell
    by_rule: NetworkPoint
    times: Mapping[NetworkPoint, Paired]
    """Of the network, by what was measured."""

    @property
    def winner(self) -> NetworkPoint | None:
        """The fastest; ties go to what is by rule, and then to few forks. None if what is by rule was not measured."""
        if self.by_rule not in self.times:
            return None
        ordered = sorted(self.times, key=lambda one: (one != self.by_rule, not one.trunk_first, len(one.forks), one))
        return winner(self.times, ordered)

    def over_rule(self, point: NetworkPoint) -> Difference | None:
        """Compare with what is by rule; None if one of them was not measured."""
        if point not in self.times or self.by_rule not in self.times:
            return None
        return compare_runs(self.times[point], self.times[self.by_rule])


def sweep_network(
    measurer: Measurer, cell: Cell, heads: Mapping[Target, LaunchConfig], book: Book, failures: Counter[str]
) -> NetworkOutcome:
    """Measure what no record says of a network, and keep it.

    Args:
        measurer: of the network.
        cell: names the network.
        heads: how its heads are launched.
        book: of the network's records.
        failures: by kind, to which those here are added.
    """
    by_rule = measurer.by_rule
    by_tap = {tap: text(config) for target, config in heads.items() for tap in target.taps}
    points = network_points(cell.taps, by_rule)
    blanks = {point: book.of_network(cell, by_tap, by_rule, point) for point in points}
    results = {point: book.find(blank) for point, blank in blanks.items()}
    missing = [point for point, result in results.items() if result is None]
    if missing:
        configs = {target.shape: config for target, config in heads.items()}
        measured = measurer.points(list(dict.fromkeys([by_rule, *missing])), configs, FINAL_ROUNDS, CAPTURES)
        results |= {point: book.add(blanks[point], measured[point]) for point in missing if point in measured}
    times = {point: result for point, result in results.items() if isinstance(result, Paired)}
    failures.update(result.kind for result in results.values() if isinstance(result, Failure))
    return NetworkOutcome(cell, by_rule, times)
