"""Tables of footprint records: one a network, with the share of the GPU each footprint takes and the time it adds."""

from collections.abc import Iterable, Sequence

from ..records.record import Record
from ..records.tables import RecordTable, latest_by_network, network_in_words

#: Columns of every table; tiers of occupancy are named and never mixed.
COLUMNS = (
    "heads launched",
    "programs",
    "both / trunk (99 % interval)",
    "heads alone, us",
    "hidden, %",
    "SM time with heads, % (residency)",
    "warps, % (residency)",
    "warps of an SM, % (theoretical)",
    "warps, % (profiler's estimate)",
)
_TEXT_COLUMNS = 1


def footprint_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return a table for each network and environment, of the last measurement of each footprint."""
    return [_table(group) for group in latest_by_network(records, "footprint")]


def _table(records: Sequence[Record]) -> RecordTable:
    title = f"Footprints: {network_in_words(records[0])}"
    measured = [one for one in records if one.error is None]
    remarks = [f"{one.variant}: not measured: {one.error}" for one in records if one.error is not None]
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, [_row(one) for one in measured], [*_remarks(measured), *remarks])


def _row(record: Record) -> tuple[str, ...]:
    assert record.measured is not None
    pairs = {pair["role"]: pair for pair in record.paired}
    trunk, tiers = pairs["trunk"], record.measured["occupancy"]
    return (
        record.variant,
        f"{record.measured['programs']:,}",
        f"{trunk['device_ratio']:.3f} ({trunk['low']:.3f}-{trunk['high']:.3f})",
        f"{pairs['heads']['device_us']['median']:,.1f}",
        f"{100 * record.measured['hiding_efficiency']['median']:.0f}",
        f"{100 * tiers['residency']['sm_share']['median']:.2f}",
        f"{100 * tiers['residency']['warps_share']['median']:.3f}",
        _of_launches([100 * one["share"] for one in tiers["theoretical"]], [False] * len(tiers["theoretical"])),
        _of_launches([one["percent"] for one in tiers["estimate"]], [one["known_zero"] for one in tiers["estimate"]]),
    )


def _of_launches(percent: Sequence[float], known_zero: Sequence[bool]) -> str:
    return ", ".join("0?" if zero else f"{one:.0f}" for one, zero in zip(percent, known_zero, strict=True))


def _remarks(records: Sequence[Record]) -> list[str]:
    if not records:
        return []
    bare = next(pair for pair in records[0].paired if pair["role"] == "trunk")["device_us"]["median"]
    lines = [
        f"The trunk alone takes {bare:,.1f} us, launches leave it after {', '.join(records[0].protocol['forks'])}. "
        "Shares by residency are of the time that it takes and of all SMs; other tiers say one for each launch. "
        "0?: the profiler says 0 of a launch that runs.",
    ]
    for record in records:
        own = next((pair for pair in record.paired if pair["role"] == "recorded"), None)
        if own is not None and record.device_us is not None:
            ratio = own["device_us"]["median"] / record.device_us["median"]
            lines.append(
                f"{record.variant}: recording residency takes {100 * (ratio - 1):+.1f} % of the network's time."
            )
    return lines
