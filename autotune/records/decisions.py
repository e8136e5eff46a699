"""What a sweep's records say of times, and which of several decide; made without torch, anywhere."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from .comparison import Paired
from .record import Record


class Timed(NamedTuple):
    """What was timed beside the rule's configuration."""

    variant: str
    """As the record names it."""
    rule: str
    """The baseline, as the record names it."""
    paired: Paired
    forks: tuple[str, ...] | None
    """In situ: the taps after which launches left the trunk."""


class BesideRule(Protocol):
    """Anything that was timed beside a rule's configuration."""

    @property
    def rule(self) -> str:
        """The baseline, as the record names it."""

    @property
    def paired(self) -> Paired:
        """Its times, and those of the baseline."""

    @property
    def forks(self) -> tuple[str, ...] | None:
        """The taps after which launches left the trunk, if it was in situ."""


One = TypeVar("One", bound=BesideRule)


def timed(record: Record) -> Timed:
    """Read the record of something that was timed.

    Raises:
        ValueError: names what it lacks.
    """
    rule = next((pair for pair in record.paired if pair.get("role") == "rule"), None)
    if record.device_us is None or "samples" not in record.device_us or rule is None or "samples" not in rule:
        raise ValueError("paired: got no samples, wants device_us and a pair of role 'rule', both with samples")
    paired = Paired(record.device_us["samples"], rule["samples"], record.run)
    forks = record.protocol.get("forks")
    return Timed(record.variant, str(rule.get("variant")), paired, None if forks is None else tuple(forks))


def of_last_kernel(records: Sequence[Record]) -> list[Record]:
    """Return those of the kernel that was measured last; other kernels' say nothing about it."""
    return [record for record in records if record.protocol["kernel"] == records[-1].protocol["kernel"]]


def times(one: BesideRule) -> int:
    """Return how often something was timed: in all rounds of all captures."""
    return sum(map(len, one.paired.own))


def deciding(measured: Iterable[One]) -> list[One]:
    """Return, of measurements of one head in one place, those that decide: the ones timed most often.

    A first look at many configurations does not. Where the rule has changed meanwhile, what was measured beside the
    last one does, since times over different baselines cannot be compared. Of those timed most often the ones with the
    last one's forks do: forks go by times of the trunk, so that a later sweep may have others, beside which a
    configuration costs something else.
    """
    found = list(measured)
    beside = [one for one in found if one.rule == found[-1].rule]
    most = max(map(times, beside), default=0)
    often = [one for one in beside if times(one) == most]
    return [one for one in often if one.forks == often[-1].forks]
