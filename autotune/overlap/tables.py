"""Tables of overlap, with the kernels that heads slow down most; and of footprints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..records.record import Record, latest
from ..records.tables import RecordTable, latest_by_network, network_in_words

#: Columns of tables of overlap.
_COLUMNS = ("measured", "what", "unit", "median", "20th to 80th percentile")
_TEXT_COLUMNS = 3
#: Columns of tables of footprints; the tier of occupancy is named.
FOOTPRINT_COLUMNS = (
    "heads launched",
    "programs",
    "both / trunk (99 % interval)",
    "heads alone, us",
    "hidden, %",
    "SM time with heads, % (residency)",
    "warps, % (residency)",
)
#: First column: whether a profiler was on.
_TIMED, _TRACED = "no profiler", "profiler"
#: Kernels of the trunk that are named.
_NAMED_KERNELS = 3
#: Characters of their names.
_NAME = 90


def overlap_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return a table for the last measurement of each network in each environment."""
    return [_table(record) for record in latest(one for one in records if one.kind == "overlap")]


def _table(record: Record) -> RecordTable:
    title = f"Overlap: {network_in_words(record)}"
    if record.error is not None or record.measured is None or record.device_us is None:
        return RecordTable(title, _COLUMNS, _TEXT_COLUMNS, [], [f"Not measured: {record.error}"])
    found, parts = record.measured, {pair["role"]: pair for pair in record.paired}
    trunk, heads = parts["trunk"], parts["heads"]
    inflation = found["inflation"]
    rows = [
        _times(_TIMED, "the trunk alone", trunk["device_us"]),
        _times(_TIMED, "all heads alone, one launch after another", heads["device_us"]),
        _times(_TIMED, "both: the overlapped network", record.device_us),
        (
            *(_TIMED, "stretch: both over the trunk alone (99 % interval)", "times"),
            f"{trunk['device_ratio']:.3f}",
            f"{trunk['low']:.3f}-{trunk['high']:.3f}",
        ),
        _share(_TIMED, "hiding efficiency: hidden of the shorter one of trunk and heads", found["hiding_efficiency"]),
        _times(_TRACED, "launches of heads beside the trunk", found["side_us"]),
        _share(_TRACED, "coverage: of that under kernels of the trunk", found["coverage"]),
        _times(_TRACED, "exposed: of that under none", found["exposed_us"]),
        _times(_TRACED, "join stall: from the trunk's last kernel to the end", found["join_stall_us"]),
        _times(_TRACED, "of that the joining launch itself, with late heads and classifier", found["join_us"]),
        _times(_TRACED, "first to last kernel, the trunk alone", found["bare_span_us"]),
        _times(_TRACED, "first to last kernel, both", found["span_us"]),
        (_TRACED, "the profiler's inflation of the trunk alone", "times", f"{inflation['trunk']:.3f}", ""),
        (_TRACED, "the profiler's inflation of both", "times", f"{inflation['both']:.3f}", ""),
    ]
    return RecordTable(title, _COLUMNS, _TEXT_COLUMNS, rows, [_launches(record), _verdict(record), *_stretched(found)])


def _times(measured: str, what: str, taken: Mapping[str, float]) -> tuple[str, ...]:
    return (measured, what, "us", f"{taken['median']:,.2f}", f"{taken['p20']:,.2f}-{taken['p80']:,.2f}")


def _share(measured: str, what: str, share: Mapping[str, float] | None) -> tuple[str, ...]:
    if share is None:
        return (measured, what, "%", "-", "-")
    median, low, high = (100.0 * share[name] for name in ("median", "p20", "p80"))
    return (measured, what, "%", f"{median:.1f}", f"{low:.1f} to {high:.1f}")


def _launches(record: Record) -> str:
    taps, forks = record.cell["taps"], record.protocol["forks"]
    heads = len(taps)
    if not forks:
        return f"None of the {heads} heads runs beside the trunk: all of them run with the classifier at its end."
    beside = taps.index(forks[-1]) + 1
    rest = "" if beside == heads else f"; the other {heads - beside} with the classifier at its end"
    launches = f"{len(forks)} launch{'es' if len(forks) > 1 else ''}"
    return f"{beside} of {heads} heads run beside the trunk, in {launches} after {', '.join(forks)}{rest}."


def _verdict(record: Record) -> str:
    assert record.measured is not None and record.device_us is not None
    (trunk,) = (pair for pair in record.paired if pair["role"] == "trunk")
    (heads,) = (pair for pair in record.paired if pair["role"] == "heads")
    added = record.device_us["median"] - trunk["device_us"]["median"]
    known = trunk["low"] <= 1.0 <= trunk["high"]
    doubt = ", which captures differ by as well" if known else ""
    hidden = 100.0 * record.measured["hiding_efficiency"]["median"]
    shorter = min((trunk, heads), key=lambda pair: float(pair["device_us"]["median"]))["role"]
    return (
        f"Heads that take {heads['device_us']['median']:,.2f} us alone add {added:+,.2f} us to the trunk{doubt}: "
        f"{hidden:.0f} % of what the {shorter} take{'s' if shorter == 'trunk' else ''} alone is hidden."
    )


def _stretched(found: Mapping[str, Any]) -> list[str]:
    """Name the kernels of the trunk that heads cost most."""
    kernels = found["kernels"]
    ordered = sorted(enumerate(kernels, start=1), key=lambda numbered: _added(numbered[1]), reverse=True)
    lines = []
    for number, one in ordered[:_NAMED_KERNELS]:
        if _added(one) > 0:
            ratio = one["both_us"] / one["bare_us"]
            name = one["name"] if len(one["name"]) <= _NAME else f"{one['name'][:_NAME]}..."
            lines.append(
                f"Stretched by heads: {_added(one):+.2f} us ({ratio:.2f} times) under the profiler, kernel {number} "
                f"of the trunk's {len(kernels)}: {name}"
            )
    return lines


def _added(kernel: Mapping[str, Any]) -> float:
    return float(kernel["both_us"] - kernel["bare_us"])


def footprint_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return a table for each network and environment, of the last measurement of each footprint."""
    return [*map(_footprint_table, latest_by_network(records, "footprint"))]


def _footprint_table(records: Sequence[Record]) -> RecordTable:
    title = f"Footprints: {network_in_words(records[0])}"
    measured = [one for one in records if one.error is None]
    remarks = [f"{one.variant}: not measured: {one.error}" for one in records if one.error is not None]
    return RecordTable(title, FOOTPRINT_COLUMNS, 1, [_row(one) for one in measured], [*_remarks(measured), *remarks])


def _row(record: Record) -> tuple[str, ...]:
    assert record.measured is not None
    pairs = {pair["role"]: pair for pair in record.paired}
    trunk, residency = pairs["trunk"], record.measured["occupancy"]["residency"]
    return (
        record.variant,
        f"{record.measured['programs']:,}",
        f"{trunk['device_ratio']:.3f} ({trunk['low']:.3f}-{trunk['high']:.3f})",
        f"{pairs['heads']['device_us']['median']:,.1f}",
        f"{100 * record.measured['hiding_efficiency']['median']:.0f}",
        f"{100 * residency['sm_share']['median']:.2f}",
        f"{100 * residency['warps_share']['median']:.3f}",
    )


def _remarks(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    bare = next(pair for pair in records[0].paired if pair["role"] == "trunk")["device_us"]["median"]
    forks = ", ".join(records[0].protocol["forks"])
    return [
        f"The trunk alone takes {bare:,.1f} us, launches leave it after {forks}. Shares by residency are of the time "
        "that it takes and of all SMs."
    ]
