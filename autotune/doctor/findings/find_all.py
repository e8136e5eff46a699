"""All findings of a trace, worst first."""

from ..finding import KINDS, Finding
from ..trace import Trace
from .graphs import find_recaptures, find_searches
from .heads import find_fusible_heads
from .host import find_host_waits, find_launch_bound, find_pageable_copies
from .memory import find_allocations
from .orders import find_noticed, find_races
from .streams import find_full_device, find_gates, find_priorities, find_unused_streams

_FINDERS = (
    find_races,
    find_noticed,
    find_unused_streams,
    find_priorities,
    find_launch_bound,
    find_host_waits,
    find_allocations,
    find_pageable_copies,
    find_full_device,
    find_gates,
    find_fusible_heads,
    find_recaptures,
    find_searches,
)
#: Kinds that make answers wrong, which go before all that costs time.
_WRONG = ("race", "freed-in-use", "unrecorded-event", "mixed-devices", "stream-class")


def find_all(trace: Trace) -> list[Finding]:
    """Return what there is: wrong answers, then costs, most first, then what has no cost."""
    order = list(KINDS)

    def rank(one: Finding) -> tuple[int, float]:
        if one.kind in _WRONG:
            return 0, order.index(one.kind)
        return (2, order.index(one.kind)) if one.cost_us is None else (1, -one.cost_us)

    return sorted((one for find in _FINDERS for one in find(trace)), key=rank)
