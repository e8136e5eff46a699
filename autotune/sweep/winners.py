"""Winners of heads, alone and in situ, by the records of sweeps; and tables of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.tuned_table import config_from
from ..measuring.heads_alone import ALONE, NETWORK, Target
from ..measuring.timers import CAPTURES
from ..records.comparison import DECIDING, Difference, tie
from ..records.decisions import Decision, Measurement, by_setting, deciding, measurement, of_last_kernel, sweep_records
from ..records.record import Record, bad_record
from ..records.tables import RecordTable
from .config_text import changes, text
from .search import decision


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

    @classmethod
    def of(cls, target: Target, alone: Decision[LaunchConfig], network: Decision[LaunchConfig]) -> "HeadWinners":
        """Collect the winners in both places, decided beside the same rule's configuration."""
        over_rule, over_alone = (network.compare(network.winner, other) for other in (alone.rule, alone.winner))
        alone_over_rule = alone.compare(alone.winner, alone.rule)
        return cls(target, alone.rule, alone.winner, alone_over_rule, network.winner, over_rule, over_alone)


#: Configurations by how records write them: a sweep has each of them many times, and a check takes 30 us.
_configs: dict[tuple[str, HeadShape], LaunchConfig] = {}


def launchable(record: Record) -> Measurement:
    """Read the record of something that was timed, its configuration as one that can be launched.

    Raises:
        BadRecord: names file, line and what the record lacks.
    """
    found, shape = measurement(record), shape_of(record)
    written = repr(found.config), shape
    if written not in _configs:
        try:
            _configs[written] = config_from(found.config, shape)
        except ValueError as error:
            raise bad_record(record, f"protocol: {error}") from None
    return found._replace(config=_configs[written])


def shape_of(record: Record) -> HeadShape:
    """Return the shape of the head that a sweep's record is about."""
    return HeadShape(**{name: record.cell[name] for name in HeadShape._fields})


def recorded_winners(records: Iterable[Record]) -> list[tuple[str, list[HeadWinners]]]:
    """Return the winners of the kernel that was swept last, with a title for each network, dtype, batch and classes.

    Heads that were measured in no network come last, under one title.

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
        in_networks = {setting.shape for setting in settings if setting.place == NETWORK}
        others = {shape: measured for shape, measured in alone.items() if shape not in in_networks}
        if others:
            winners = [_winners(Target(HeadShape(*shape)), measured, []) for shape, measured in others.items()]
            found.append((f"Heads alone; {_where(its[-1])}", winners))
    return found


def _title(record: Record) -> str:
    cell = record.cell
    return f"{cell['model']} {cell['dtype']}, batch {cell['samples']}, {cell['classes']} classes; {_where(record)}"


def _where(record: Record) -> str:
    environment = record.environment
    return f"{environment.get('gpu')}, torch {environment.get('torch')}, kernel {record.protocol['kernel']}"


def _winners(target: Target, alone: Sequence[Record], in_situ: Sequence[Record]) -> HeadWinners:
    """Decide by records of one target; what was timed beside another rule than the last, in situ if any, is left."""
    places: Mapping[str, Sequence[Record]] = {ALONE: alone, NETWORK: in_situ}
    measured = {place: [launchable(one) for one in its if one.error is None] for place, its in places.items()}
    last = [one.rule for place in (ALONE, NETWORK) for one in measured[place]][-1:]
    rule = last[0] if last else text(target.rule)
    configs = {one.variant: one.config for found in measured.values() for one in found}
    baseline = configs.get(rule, target.rule)
    times = {
        place: {one.config: one.paired for one in deciding(one for one in found if one.rule == rule)}
        for place, found in measured.items()
    }
    decided = {place: decision(baseline, its) for place, its in times.items()}
    return HeadWinners.of(target, decided[ALONE], decided[NETWORK])


#: Columns of every table; the last two compare times of the whole network with the winner in situ.
COLUMNS = (
    "taps",
    "by rule",
    "winner alone",
    "winner in situ",
    "outcome",
    "its time / rule's, alone",
    "network's time / with rule's",
    "network's time / with winner alone",
)
#: Number of them that are text.
_TEXT_COLUMNS = 5


def sweep_tables(records: Sequence[Record]) -> list[RecordTable]:
    """Return the tables of winners by records, one for each network; none if there are no records of sweeps."""
    tables = winner_tables(recorded_winners(records))
    if tables:
        tables[-1].remarks.extend(self_comparison(records))
    return tables


def winner_tables(found: Sequence[tuple[str, Sequence[HeadWinners]]]) -> list[RecordTable]:
    """Return a table for each title and the winners under it, a shape of heads a row, below the last the count of all.

    Winners are told by what of the rule's configuration they change.
    """
    tables = [RecordTable(title, COLUMNS, _TEXT_COLUMNS, [*map(_row, winners)], []) for title, winners in found]
    if tables:
        tables[-1].remarks.extend(summary([one for _, winners in found for one in winners]))
    return tables


def _row(found: HeadWinners) -> tuple[str, ...]:
    winners, taps = (found.alone, found.network), found.target.taps
    decided = found.network if taps else found.alone
    return (
        ", ".join(taps) or str(found.target.shape),
        text(found.rule),
        *("-" if config is None else changes(config, found.rule) for config in winners),
        "failed" if decided is None else "tie" if decided == found.rule else "win",
        _ratio_in_words(found.alone_over_rule, found.alone == found.rule),
        _ratio_in_words(found.over_rule, found.network == found.rule),
        _ratio_in_words(found.over_alone, found.network == found.alone),
    )


def _ratio_in_words(difference: Difference | None, same: bool) -> str:
    """Write a ratio with its interval, and whether that is a difference; ``same``: of one thing to itself."""
    if difference is None:
        return "-"
    if same:
        return "the same"
    ratio = f"{difference.median_ratio:.3f} ({difference.low:.3f}-{difference.high:.3f})"
    return f"{ratio}, no difference" if difference.is_tie else ratio


def summary(winners: Sequence[HeadWinners]) -> list[str]:
    """Count, in a line each, how winners in situ compare with winners alone and with the rule's configurations."""
    winners = [found for found in winners if found.target.taps]
    against = {
        "the winner alone": [(found.over_alone, found.network == found.alone) for found in winners],
        "the rule's configuration": [(found.over_rule, found.network == found.rule) for found in winners],
    }
    return [
        f"Whole network, winner in situ against {what}: {_counts(found)}." for what, found in against.items() if found
    ]


def _counts(found: Sequence[tuple[Difference | None, bool]]) -> str:
    compared = [(difference, same) for difference, same in found if difference is not None]
    differing = [difference.median_ratio for difference, _ in compared if not difference.is_tie]
    faster = sum(ratio < 1.0 for ratio in differing)
    same = sum(same for _, same in compared)
    counts = f"of {len(found)} heads {faster} faster, {len(compared) - len(differing)} no difference "
    counts += f"({same} the same configuration), {len(differing) - faster} slower"
    return counts + (f", {len(found) - len(compared)} not compared" if len(compared) < len(found) else "")


def self_comparison(records: Iterable[Record]) -> list[str]:
    """Return a line with the count of often captured configurations that look different from themselves (A/A).

    Each one's first captures are compared with its last ones, as two configurations are that were captured as often.
    A difference there is chance; there is no line where nothing was captured twice ``CAPTURES`` times.
    """
    compared = differing = 0
    for record in sweep_records(records):
        captures = (record.device_us or {}).get("samples", [])
        half = len(captures) // 2
        if half >= CAPTURES:
            compared += 1
            differing += not tie(captures[:half], captures[half:], confidence=DECIDING)
    if not compared:
        return []
    return [
        f"A/A: of {compared:,} configurations {differing} ({differing / compared:.2%}) look different from themselves, "
        f"the first half of their captures against the second."
    ]
