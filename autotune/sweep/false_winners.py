"""A/A comparisons: how often what is the same looks different, by the captures that sweeps have recorded."""

from collections.abc import Iterable

from ..measuring.timers import CAPTURES
from ..records.comparison import DECIDING, compare
from ..records.record import Record
from .records import sweep_records


def false_winners(records: Iterable[Record]) -> list[str]:
    """Say in a line how many of the configurations that were captured often look different from themselves.

    Each one's first captures are compared with its last ones, as two configurations are that were captured as often.
    What differs there is found by chance; none is said where nothing was captured twice ``CAPTURES`` times.
    """
    compared = differing = 0
    for record in sweep_records(records):
        captures = (record.device_us or {}).get("samples", [])
        half = len(captures) // 2
        if half >= CAPTURES:
            compared += 1
            differing += not compare(captures[:half], captures[half:], confidence=DECIDING).is_tie
    if not compared:
        return []
    return [
        f"A/A: of {compared:,} configurations {differing} ({differing / compared:.2%}) look different from themselves, "
        f"the first half of their captures against the second."
    ]
