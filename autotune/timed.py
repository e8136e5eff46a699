"""What a sweep's records say of times, and which of several decide; made without torch, anywhere."""

import json
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


class BesideRule(Protocol):
    """Anything that was timed beside a rule's configuration."""

    @property
    def rule(self) -> str:
        """The baseline, as the record names it."""

    @property
    def paired(self) -> Paired:
        """Its times, and those of the baseline."""


One = TypeVar("One", bound=BesideRule)


def timed(record: Record) -> Timed:
    """Read the record of something that was timed.

    Raises:
        ValueError: names what it lacks.
    """
    rule = next((pair for pair in record.paired if pair.get("role") == "rule"), None)
    if record.device_us is None or "samples" not in record.device_us or rule is None or "samples" not in rule:
        raise ValueError("paired: got no samples, wants device_us and a pair of role 'rule', both with samples")
    return Timed(
        record.variant, str(rule.get("variant")), Paired(record.device_us["samples"], rule["samples"], record.run)
    )


def of_last_kernel(records: Sequence[Record]) -> list[Record]:
    """Return those of the kernel that was measured last; other kernels' say nothing about it."""
    return [record for record in records if record.protocol["kernel"] == records[-1].protocol["kernel"]]


def of_last_forks(records: Sequence[Record]) -> list[Record]:
    """Leave out what was measured in situ while launches left the trunk elsewhere than where it decides of that head.

    Forks go by times of the trunk, so that a later sweep of a network may have others, beside which a configuration
    costs something else. Those decide where something was timed most often, of these the ones that were measured last.
    """
    most: dict[str, dict[str, int]] = {}
    for record in records:
        timings = (record.device_us or {}).get("samples", ())
        of_head = most.setdefault(_head(record), {})
        forks = _forks(record)
        of_head[forks] = max(of_head.pop(forks, 0), sum(map(len, timings)))  # to the end: measured last
    decide = {head: max(reversed(of_head), key=of_head.__getitem__) for head, of_head in most.items()}
    return [record for record in records if _forks(record) == decide[_head(record)]]


def _head(record: Record) -> str:
    """Name a head, and the network around it if it is in one."""
    around = [record.protocol.get(name) for name in ("place", "kernel", "trunk")]
    return json.dumps([record.cell, record.environment_key, around], sort_keys=True)


def _forks(record: Record) -> str:
    return json.dumps(record.protocol.get("forks"))


def times(one: BesideRule) -> int:
    """Return how often something was timed: in all rounds of all captures."""
    return sum(map(len, one.paired.own))


def deciding(measured: Iterable[One]) -> list[One]:
    """Return, of measurements of one head in one place, those that decide: the ones timed most often.

    A first look at many configurations does not. Where the rule has changed meanwhile, what was measured beside the
    last one does, since times over different baselines cannot be compared.
    """
    found = list(measured)
    beside = [one for one in found if one.rule == found[-1].rule]
    most = max(map(times, beside), default=0)
    return [one for one in beside if times(one) == most]
