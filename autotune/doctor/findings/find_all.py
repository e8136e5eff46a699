"""``find_all``: every finding of a trace, those that make answers wrong first, then what costs most."""

from collections.abc import Callable

from ..finding import KINDS, Finding
from ..trace import Trace
from .graphs import find_recaptures, find_trials
from .heads import find_fusible_heads, find_gate_waits
from .host import find_host_waits
from .launches import find_launch_bound
from .memory import find_allocations, find_pageable_copies
from .occupancy import find_full_device
from .orders import find_noticed, find_races
from .streams import find_default_stream, find_priorities

#: Kinds that make answers wrong.
WRONG = ("race", "freed-in-use", "unrecorded-event", "mixed-devices")

_ALL: tuple[Callable[[Trace], list[Finding]], ...] = (
    find_races,
    find_noticed,
    find_default_stream,
    find_priorities,
    find_launch_bound,
    find_host_waits,
    find_allocations,
    find_pageable_copies,
    find_full_device,
    find_gate_waits,
    find_fusible_heads,
    find_recaptures,
    find_trials,
)


def find_all(trace: Trace) -> list[Finding]:
    """Return all findings: wrong answers in the order of KINDS, then by cost, and last those whose cost is unknown."""
    order = list(KINDS)

    def place(finding: Finding) -> tuple[bool, int, float, int]:
        kind = order.index(finding.kind)
        if finding.kind in WRONG:
            return False, kind, 0.0, kind
        return True, int(finding.cost_us is None), -(finding.cost_us or 0.0), kind

    return sorted((finding for find in _ALL for finding in find(trace)), key=place)
