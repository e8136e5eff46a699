"""Findings on heads: those that could each be one launch."""

import statistics

from ..finding import Finding, Mark
from ..trace import Trace
from .causes import times

#: What a fused head takes about, microseconds.
_FUSED_US = 5.0


def find_fusible_heads(trace: Trace) -> list[Finding]:
    """Find heads that :func:`fuse_aux_heads` would replace and that run as several kernels."""
    names = [one.name for one in trace.watched.heads if one.why_not is None] if trace.watched is not None else []
    if not names:
        return []
    counts, costs = [], []
    for request in trace.requests:
        work = [one for one in request.work if one.call is not None and one.call.head in names]
        counts.append(len(work))
        costs.append(
            max(0.0, sum(one.us for one in work) - _FUSED_US * len({one.call and one.call.head for one in work}))
        )
    marks = [
        Mark(one.start_us, one.end_us, one.stream)
        for one in trace.shown.work
        if one.call is not None and one.call.head in names
    ]
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return [
        Finding(
            "fusible-heads",
            f"{times(len(names), 'head')} could be one launch each: {listed}.",
            (f"they are {times(statistics.median(counts), 'kernel')} a request now",),
            "Let auxhead make one kernel of each head, and a runner launch them beside the next block.",
            "from auxhead.model import fuse_aux_heads\n"
            "report = fuse_aux_heads(model)  # in place; or attach the heads to the backbone:\n"
            "network = EarlyExitNetwork(backbone, heads, example_input=images)\n"
            "runner = make_runner(network, images)",
            statistics.median(costs),
            marks=tuple(marks),
        )
    ]
