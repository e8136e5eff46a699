"""What ``auxhead profile`` prints."""

from collections.abc import Iterable
from statistics import median, quantiles

from rich.console import Console
from rich.table import Column, Table

from .before_and_after import AFTER, BEFORE, BeforeAndAfter
from .profiling import ApiCalls


def print_comparison(console: Console, comparison: BeforeAndAfter) -> None:
    """Print requests, API calls and what was checked."""
    console.print(_requests_table(comparison))
    console.print(_api_table(comparison))
    for line in _checks(comparison):
        console.print(line, highlight=False, soft_wrap=True)


def _requests_table(comparison: BeforeAndAfter) -> Table:
    times = [comparison.times[name] for name in (BEFORE, AFTER)]
    profiles = [comparison.profiles[name] for name in (BEFORE, AFTER)]
    columns = [Column(name, justify="right") for name in (BEFORE, AFTER)]
    table = Table(Column("one request", no_wrap=True), "unit", *columns)
    table.title = "Host times: median (p20-p80), no profiler; the rest: means under it"

    def row(name: str, unit: str, values: Iterable[str]) -> None:
        table.add_row(name, unit, *values)

    row("host, until the answer is there", "us", (_spread(time.answer_us) for time in times))
    row("host, until the call returns", "us", (_spread(time.call_us) for time in times))
    row("device, sum of kernel times", "us", (f"{profile.kernel_us:,.1f}" for profile in profiles))
    row("device, busy (union of kernels)", "us", (f"{profile.busy_us:,.1f}" for profile in profiles))
    table.add_section()
    row("launches by the host", "calls", (_count(profile.launches) for profile in profiles))
    row("  CUDA graphs among them", "calls", (_count(profile.graph_launches) for profile in profiles))
    row("kernels that ran", "kernels", (_count(profile.kernels) for profile in profiles))
    row("copies that ran", "copies", (_count(profile.copies) for profile in profiles))
    row("memsets that ran", "memsets", (_count(profile.fills) for profile in profiles))
    table.add_section()
    row(f"allocations, {profiles[0].requests} requests", "calls", (f"{profile.allocations:,}" for profile in profiles))
    row(f"waits, {profiles[0].requests} requests", "calls", (f"{profile.synchronisations:,}" for profile in profiles))
    return table


def _api_table(comparison: BeforeAndAfter) -> Table:
    headings = [f"{name},\n{unit}" for name in (BEFORE, AFTER) for unit in ("calls", "host us")]
    columns = [Column("CUDA API, one request", no_wrap=True), *(Column(text, justify="right") for text in headings)]
    table = Table(*columns, title="CUDA API calls, under the profiler, which adds to their time")
    rows = [{row.name: row for row in comparison.profiles[name].api} for name in (BEFORE, AFTER)]
    for name in dict.fromkeys([*rows[0], *rows[1]]):
        table.add_row(name, *(text for side in rows for text in _cells([side[name]] if name in side else [])))
    table.add_section()
    table.add_row("all", *(text for side in rows for text in _cells(list(side.values()))))
    return table


def _cells(rows: list[ApiCalls]) -> tuple[str, str]:
    """Calls and host time of one side of a row."""
    if not rows:
        return "-", "-"
    return _count(sum(row.calls for row in rows)), f"{sum(row.host_us for row in rows):,.1f}"


def _checks(comparison: BeforeAndAfter) -> list[str]:
    samples = comparison.samples_by_exit
    batch = sum(samples.values())
    lines = ["Samples by exit: " + ", ".join(f"{name} {count}" for name, count in samples.items()) + "."]
    for name, counts in comparison.counts.items():
        line = f"Label and exit as from the eager runner, {name}: {batch - counts['differing']} of {batch} samples"
        near = counts["differing_near"]
        close = f"; {near} within rounding of a threshold or a second label" if near else ""
        lines.append(line + close + ".")
    if comparison.problems:
        lines.append("After is not in a steady state:")
        lines += [f"  {problem}" for problem in comparison.problems]
    else:
        lines.append(
            "After is in a steady state: no CUDA call that allocates, frees or waits for the device, "
            "and as many launches in each request."
        )
    return lines


def _spread(values: tuple[float, ...]) -> str:
    p20, _, _, p80 = quantiles(values, n=5, method="inclusive")
    return f"{median(values):,.0f}\n({p20:,.0f}-{p80:,.0f})"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"
