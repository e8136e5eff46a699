"""Which of a sweep's measurements decide: those that were timed most often, each configuration's last."""

from collections.abc import Iterable
from typing import NamedTuple

from ...kernels.launch_config import LaunchConfig
from ...kernels.tuned_table import config_from
from ..records.comparison import Paired
from ..records.decisions import deciding, timed
from ..records.record import Record


class Measurement(NamedTuple):
    """What one record of a sweep says; see ``Timed``."""

    config: LaunchConfig
    variant: str
    rule: str
    paired: Paired
    forks: tuple[str, ...] | None


def measurement(record: Record) -> Measurement:
    """Read the record of something that was timed.

    Raises:
        ValueError: names what it lacks.
    """
    found = timed(record)
    return Measurement(config_from(record.protocol.get("config"), str(record.cell.get("pool"))), *found)


def decisive(measured: Iterable[Measurement]) -> dict[LaunchConfig, Measurement]:
    """Return, of measurements of one head in one place, those that decide; see ``deciding``."""
    return {one.config: one for one in deciding(measured)}
