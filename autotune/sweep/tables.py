"""Tables of winners, alone and in situ; below, how many heads gain, and how often equal things look different."""

from collections.abc import Iterable, Sequence

from ..measuring.timers import CAPTURES
from ..records.comparison import DECIDING, Difference, tie
from ..records.decisions import sweep_records
from ..records.record import Record
from ..records.tables import RecordTable
from .config_text import changes, text
from .winners import HeadWinners, recorded_winners

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
    winners = (found.alone, found.network)
    return (
        ", ".join(found.target.taps),
        text(found.rule),
        *("-" if config is None else changes(config, found.rule) for config in winners),
        "failed" if found.network is None else "tie" if found.network == found.rule else "win",
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
    said = f"{difference.median_ratio:.3f} ({difference.low:.3f}-{difference.high:.3f})"
    return f"{said}, no difference" if difference.is_tie else said


def summary(winners: Sequence[HeadWinners]) -> list[str]:
    """Count, in a line each, how winners in situ compare with winners alone and with the rule's configurations."""
    against = {
        "the winner alone": [(found.over_alone, found.network == found.alone) for found in winners],
        "the rule's configuration": [(found.over_rule, found.network == found.rule) for found in winners],
    }
    return [f"Whole network, winner in situ against {what}: {_counts(found)}." for what, found in against.items()]


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
