"""Records in place of a GPU: answers a sweep's questions by what earlier sweeps measured."""

from collections.abc import Mapping, Sequence

from ...kernels.head_shape import HeadShape
from ...kernels.launch_config import LaunchConfig
from ...kernels.launch_rule import config_by_rule
from ..measuring.failures import Failure
from ..measuring.targets import NETWORK, Target
from ..records.comparison import Paired
from ..records.decisions import of_last_kernel
from ..records.record import Record
from .config_text import text
from .records import result_of, shape_of, size, smallest_enough

#: The kind of failure of what no record holds.
UNAVAILABLE = "not recorded"


class RecordedTimes:
    """A :class:`~auxhead.autotune.sweep.measure.Measurer` that answers from records, wherever they were measured.

    Not from those beside another rule's configuration than today's, or of another kernel than the last.
    The answer has as many captures and rounds as asked for, or the next larger numbers, or else the largest; of several
    such records it is the last.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        """Answer from ``records``, those of other kinds aside."""
        self._found: dict[tuple[HeadShape, str, str, str], list[Record]] = {}
        """By the head's shape, the place, there the model and taps (alone none), and the configuration's name."""
        for record in of_last_kernel(records):
            shape, place = shape_of(record), record.protocol["place"]
            if record.paired and record.paired[0]["variant"] != text(config_by_rule(shape)):
                continue
            network = f"{record.cell['model']}: {record.cell['tap']}" if place == NETWORK else ""
            self._found.setdefault((shape, place, network, record.variant), []).append(record)

    def begin_to_compile(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> None:
        """Do nothing."""

    def compile(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Return what failed when it was recorded, at whatever step, and what is not there."""
        found = {config: self._result(target, place, config, 1, 1) for config in configs}
        return {config: result for config, result in found.items() if isinstance(result, Failure)}

    def check(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Return nothing: what is recorded was checked."""
        return {}

    def time(
        self, target: Target, place: str, configs: Sequence[LaunchConfig], rounds: int, captures: int
    ) -> Mapping[LaunchConfig, Paired | Failure]:
        """Return the times that were recorded."""
        return {config: self._result(target, place, config, rounds, captures) for config in configs}

    def _result(self, target: Target, place: str, config: LaunchConfig, rounds: int, captures: int) -> Paired | Failure:
        network = f"{target.model}: {', '.join(target.taps)}" if place == NETWORK else ""
        records = self._found.get((target.shape, place, network, text(config)))
        if records is None:
            return Failure(UNAVAILABLE, f"{text(config)}, {place}")
        measured = [record for record in records[::-1] if record.error is None] or records[::-1]  # the last one first
        return result_of(smallest_enough(measured, rounds, captures) or max(measured, key=size))


def recorded_targets(records: Sequence[Record], model: str) -> list[Target]:
    """Return the targets of a model that were swept in situ, in order of first appearance."""
    found = [
        Target(shape_of(record), model, tuple(record.cell["tap"].split(", ")))
        for record in of_last_kernel(records)
        if record.protocol["place"] == NETWORK and record.cell["model"] == model
    ]
    return list(dict.fromkeys(found))
