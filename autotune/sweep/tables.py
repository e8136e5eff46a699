"""Tables of what sweeps found, and how often it was worth the while."""

from collections.abc import Sequence

from ..records.comparison import Difference
from ..records.tables import RecordTable
from .outcome import Outcome
from .space import changes, text

#: Of every table; the last two compare times of the whole network with the winner in situ.
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
#: How many of them are text.
_TEXT_COLUMNS = 5


def outcome_tables(found: Sequence[tuple[str, Sequence[Outcome]]]) -> list[RecordTable]:
    """Return a table for each title and the outcomes under it, a shape of heads a row, below the last the count of all.

    Winners are told by what of the rule's configuration they change.
    """
    tables = [RecordTable(title, COLUMNS, _TEXT_COLUMNS, [*map(_row, outcomes)], []) for title, outcomes in found]
    if tables:
        tables[-1].remarks.extend(summary([outcome for _, outcomes in found for outcome in outcomes]))
    return tables


def _row(found: Outcome) -> tuple[str, ...]:
    winners = (found.alone, found.network)
    return (
        ", ".join(found.target.taps),
        text(found.rule),
        *("-" if config is None else changes(config, found.rule) for config in winners),
        "failed" if found.network is None else "tie" if found.network == found.rule else "win",
        ratio_in_words(found.alone_over_rule, found.alone == found.rule),
        ratio_in_words(found.over_rule, found.network == found.rule),
        ratio_in_words(found.over_alone, found.network == found.alone),
    )


def ratio_in_words(difference: Difference | None, same: bool) -> str:
    """Write how times compare, with the interval, and whether that is a difference; ``same``: it is the same thing."""
    if difference is None:
        return "-"
    if same:
        return "the same"
    said = f"{difference.median_ratio:.3f} ({difference.low:.3f}-{difference.high:.3f})"
    return f"{said}, no difference" if difference.is_tie else said


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Count, in a line each, how winners in situ compare with winners alone and with the rule's configurations."""
    against = {
        "the winner alone": [(found.over_alone, found.network == found.alone) for found in outcomes],
        "the rule's configuration": [(found.over_rule, found.network == found.rule) for found in outcomes],
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
