"""Prints a diagnosis: the verdict, then findings, worst first, with evidence, cost, remedy and snippet."""

from collections.abc import Sequence

from rich.console import Console

from .finding import Finding
from .sources import place_in_words
from .trace import Trace
from .verdict import Verdict

#: Kinds that only a run tells, not a trace by itself.
LIVE_ONLY = (
    "race",
    "freed-in-use",
    "unrecorded-event",
    "mixed-devices",
    "stream-class",
    "priority",
    "fusible-heads",
)


def print_diagnosis(console: Console, trace: Trace, findings: Sequence[Finding], verdict: Verdict) -> None:
    """Print all of it."""
    requests = len(trace.requests)
    console.print(f"{requests} request{'s' * (requests != 1)}, told by {trace.cut_by}.", soft_wrap=True)
    for line in verdict.sentences():
        console.print(line, soft_wrap=True)
    if not trace.has_stacks:
        console.print("The trace has no source lines: record it with torch.profiler.profile(with_stack=True).")
    if trace.watched is None:
        console.print(f"Not looked for, since a trace does not tell: {', '.join(LIVE_ONLY)}.", soft_wrap=True)
    for number, one in enumerate(findings, start=1):
        console.print()
        _print_finding(console, number, one)
    console.print()
    count = len(findings)
    console.print("No finding." if not count else f"{count} finding{'s' * (count != 1)}.")


def _print_finding(console: Console, number: int, one: Finding) -> None:
    cost = "" if one.cost_us is None else f"  ({one.cost_us:,.0f} us a request)"
    console.print(f"{number}. {one.kind}: {one.what}{cost}", style="bold", soft_wrap=True)
    for line in one.lines:
        console.print(f"   {place_in_words(line)}", soft_wrap=True)
    for line in one.evidence:
        console.print(f"   - {line}", soft_wrap=True)
    console.print(f"   Remedy: {one.remedy}", soft_wrap=True)
    for line in one.snippet.splitlines():
        console.print(f"       {line}", style="cyan", soft_wrap=True)
