"""Which of a sweep's measurements decide: those that were timed most often, each configuration's last."""

from collections.abc import Iterable
from typing import NamedTuple

from ..kernels.launch_config import LaunchConfig
from ..kernels.tuned_table import config_from
from .comparison import Paired
from .record import Record


class Measurement(NamedTuple):
    """What one record of a sweep says."""

    config: LaunchConfig
    variant: str
    """As the record names it."""
    rule: str
    """The baseline, as the record names it."""
    paired: Paired

    @property
    def times(self) -> int:
        """How often it was timed: in all rounds of all captures."""
        return sum(map(len, self.paired.own))


def measurement(record: Record) -> Measurement:
    """Read the record of something that was timed.

    Raises:
        ValueError: names what it lacks.
    """
    rule = next((pair for pair in record.paired if pair.get("role") == "rule"), None)
    if record.device_us is None or "samples" not in record.device_us or rule is None or "samples" not in rule:
        raise ValueError("paired: got no samples, wants device_us and a pair of role 'rule', both with samples")
    config = config_from(record.protocol.get("config"), str(record.cell.get("pool")))
    paired = Paired(record.device_us["samples"], rule["samples"], record.run)
    return Measurement(config, record.variant, str(rule.get("variant")), paired)


def decisive(measured: Iterable[Measurement]) -> dict[LaunchConfig, Measurement]:
    """Return, of measurements of one head in one place, those that decide.

    A first look at many configurations does not. Where the rule has changed meanwhile, what was measured beside the
    last one does, since times over different baselines cannot be compared.
    """
    found = list(measured)
    beside = [one for one in found if one.rule == found[-1].rule]
    most = max((one.times for one in beside), default=0)
    return {one.config: one for one in beside if one.times == most}
