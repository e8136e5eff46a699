"""Winners of a head, alone and in situ, and how they compare: from a sweep's answers, or from records alone."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.tuned_table import config_from
from ..measuring.targets import ALONE, NETWORK, Target
from ..records.comparison import Difference
from ..records.decisions import Decision, Measurement, by_setting, deciding, measurement, of_last_kernel
from ..records.record import Record, bad_record
from .config_text import parse, text
from .search import Answers, decision


class HeadWinners(NamedTuple):
    """Winners of one target."""

    target: Target
    rule: LaunchConfig
    """The baseline of all times."""
    alone: LaunchConfig | None
    """The winner alone; None if nothing could be measured."""
    alone_over_rule: Difference | None
    network: LaunchConfig | None
    """The winner in situ."""
    over_rule: Difference | None
    """Times of the whole network: the winner in situ against the rule's configuration."""
    over_alone: Difference | None
    """And against the winner alone."""
    failures: Counter[str]
    """Count of failures by kind."""

    @classmethod
    def of(
        cls, target: Target, alone: Decision[LaunchConfig], network: Decision[LaunchConfig], failures: Counter[str]
    ) -> "HeadWinners":
        """Collect the winners in both places, decided beside the same rule's configuration."""
        over_rule, over_alone = (network.compare(network.winner, other) for other in (alone.rule, alone.winner))
        alone_over_rule = alone.compare(alone.winner, alone.rule)
        return cls(target, alone.rule, alone.winner, alone_over_rule, network.winner, over_rule, over_alone, failures)


#: Configurations by how records write them: a sweep has each of them many times, and a check takes 30 us.
_configs: dict[tuple[str, str], LaunchConfig] = {}


def launchable(record: Record) -> Measurement:
    """Read the record of something that was timed, its configuration as one that can be launched.

    Raises:
        BadRecord: names file, line and what the record lacks.
    """
    found, pool = measurement(record), record.cell["pool"]
    written = repr(found.config), pool
    if written not in _configs:
        try:
            _configs[written] = config_from(found.config, pool)
        except ValueError as error:
            raise bad_record(record, f"protocol: {error}") from None
    return found._replace(config=_configs[written])


def deciding_times(measured: Iterable[Measurement]) -> Answers:
    """Return the times that decide in one setting, of ``launchable`` measurements; each configuration's last."""
    return {one.config: one.paired for one in deciding(measured)}


def recorded_winners(records: Iterable[Record]) -> list[tuple[str, list[HeadWinners]]]:
    """Return the winners of the kernel that was swept last, with a title for each network, dtype, batch and classes.

    Raises:
        BadRecord: a record of a sweep that lacks something.
    """
    by_environment: dict[tuple[Any, ...], list[Record]] = {}
    for record in of_last_kernel(records):
        environment = (*record.environment_key, record.environment.get("sm_count"))
        by_environment.setdefault(environment, []).append(record)
    found: list[tuple[str, list[HeadWinners]]] = []
    for its in by_environment.values():
        settings = by_setting(its)
        alone = {setting.shape: measured for setting, measured in settings.items() if setting.place == ALONE}
        networks: dict[tuple[Any, ...], tuple[str, list[HeadWinners]]] = {}
        for setting, in_situ in settings.items():
            if setting.place == NETWORK:
                record, shape = in_situ[0], HeadShape(*setting.shape)
                target = Target(shape, record.cell["model"], tuple(record.cell["tap"].split(", ")))
                network = (record.protocol.get("trunk"), target.model, shape.samples, shape.dtype, shape.classes)
                _, winners = networks.setdefault(network, (_title(record), []))
                winners.append(_winners(target, alone.get(setting.shape, []), in_situ))
        found += networks.values()
    return found


def _title(record: Record) -> str:
    cell, environment = record.cell, record.environment
    return (
        f"{cell['model']} {cell['dtype']}, batch {cell['samples']}, {cell['classes']} classes; "
        f"{environment.get('gpu')}, torch {environment.get('torch')}, kernel {record.protocol['kernel']}"
    )


def _winners(target: Target, alone: Sequence[Record], in_situ: Sequence[Record]) -> HeadWinners:
    """Decide by records of one target; what was timed beside another rule than the last in situ is passed over."""
    places: Mapping[str, Sequence[Record]] = {ALONE: alone, NETWORK: in_situ}
    measured = {place: [launchable(one) for one in its if one.error is None] for place, its in places.items()}
    rule = measured[NETWORK][-1].rule if measured[NETWORK] else text(target.rule)
    try:
        baseline = parse(rule)
    except ValueError as error:
        last = [one for one in in_situ if one.error is None][-1]
        raise bad_record(last, f"paired, rule: {error}") from None
    decided = {
        place: decision(baseline, deciding_times(one for one in found if one.rule == rule))
        for place, found in measured.items()
    }
    failed = {(place, one.variant): one.error for place, its in places.items() for one in its if one.error is not None}
    kinds = Counter(error.partition(": ")[0] for error in failed.values())
    return HeadWinners.of(target, decided[ALONE], decided[NETWORK], kinds)
