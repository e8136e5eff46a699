"""Measuring without a GPU: a measurer that answers from records."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...kernels.launch_config import LaunchConfig
from ...kernels.launch_rule import config_by_rule
from ..measuring.failures import Failure
from ..measuring.targets import ALONE, NETWORK, Target
from ..records.comparison import Paired
from ..records.decisions import of_last_kernel
from ..records.record import Record
from .records import has_enough, result_of, shape_of, size, sweep_records
from .space import text

#: The kind of failure of what no record holds.
UNAVAILABLE = "not recorded"


class _Thing(NamedTuple):
    """What was measured."""

    shape: tuple[object, ...]
    place: str
    network: str
    """Model and taps; empty alone."""
    variant: str


class ReplayMeasurer:
    """Answers from the records of earlier sweeps, wherever they were measured; what is not there is unavailable.

    Nor is what was measured beside another rule's configuration than today's, or with another kernel than the last.
    Of a configuration that was measured more than once the answer has as many captures and rounds as asked for, or the
    next larger numbers, or else the largest; of several such records it is the last.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        """Answer from ``records``, those of other kinds aside."""
        self._found: dict[_Thing, list[Record]] = {}
        for record in of_last_kernel(sweep_records(records)):
            if record.paired and record.paired[0]["variant"] != text(config_by_rule(shape_of(record))):
                continue
            place = record.protocol["place"]
            network = f"{record.cell['model']}: {record.cell['tap']}" if place == NETWORK else ""
            thing = _Thing(shape_of(record), place, network, record.variant)
            self._found.setdefault(thing, []).append(record)

    def begin_to_compile(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> None:
        """Do nothing."""

    def compile(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Return what failed when it was recorded, at whatever step, and what is not there."""
        found = {config: self._result(target, place, config, 1, 1) for config in configs}
        return {config: result for config, result in found.items() if isinstance(result, Failure)}

    def check(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Return nothing: what is recorded was checked."""
        return {}

    def alone(
        self, target: Target, configs: Sequence[LaunchConfig], rounds: int, captures: int
    ) -> Mapping[LaunchConfig, Paired | Failure]:
        """Return the times that were recorded alone."""
        return {config: self._result(target, ALONE, config, rounds, captures) for config in configs}

    def in_situ(
        self, target: Target, configs: Sequence[LaunchConfig], rounds: int, captures: int
    ) -> Mapping[LaunchConfig, Paired | Failure]:
        """Return the times that were recorded of the whole network."""
        return {config: self._result(target, NETWORK, config, rounds, captures) for config in configs}

    def _result(self, target: Target, place: str, config: LaunchConfig, rounds: int, captures: int) -> Paired | Failure:
        network = f"{target.model}: {', '.join(target.taps)}" if place == NETWORK else ""
        records = self._found.get(_Thing(target.shape, place, network, text(config)))
        if records is None:
            return Failure(UNAVAILABLE, f"{text(config)}, {place}")
        measured = [record for record in records[::-1] if record.error is None] or records[::-1]  # the last one first
        enough = [one for one in measured if has_enough(one, rounds, captures)]
        return result_of(min(enough, key=size) if enough else max(measured, key=size))


def recorded_targets(records: Sequence[Record], model: str) -> list[Target]:
    """Return what of a model was swept in situ, in order of first appearance."""
    found = [
        Target(shape_of(record), model, tuple(record.cell["tap"].split(", ")))
        for record in of_last_kernel(sweep_records(records))
        if record.protocol["place"] == NETWORK and record.cell["model"] == model
    ]
    return list(dict.fromkeys(found))
