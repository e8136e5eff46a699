"""Tables of the benchmark's records: times of every variant, beside the bare trunk and the floor; accuracy and time."""

from collections.abc import Iterable, Sequence

from ..records.record import Record
from ..records.tables import RecordTable, latest_by_network, network_in_words, percentiles_in_words

#: Headings; the last five compare with baselines of the same run.
COLUMNS = (
    "exits",
    "variant",
    "host to answer, us",
    "device, us",
    "host / bare",
    "device / bare",
    "host over floor, us",
    "device over floor, us",
    "throughput / floor",
)
#: How many of them are text, from the left.
_TEXT_COLUMNS = 2
_PARETO_COLUMNS = (
    "thresholds",
    "variant",
    "accuracy",
    "mean to the answer, us",
    "mean / bare",
    "median to the answer, us",
    "device, us",
)


def bench_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return one table for each cell and environment, of the last measurement of each variant.

    Ratios compare with the bare trunk of the same kind and run, if it was measured; the columns of the floor with the
    network cut off at the exit or, for mixed exits, the trunk's segments for the samples still open. Throughput is that
    of calls back to back, by their device time.
    """
    return [_table(group) for group in latest_by_network(records, "bench")]


def _table(records: Sequence[Record]) -> RecordTable:
    title = f"{network_in_words(records[0])}; median (20th to 80th percentile)"
    order = {pattern: place for place, pattern in enumerate(["never", *records[0].cell["taps"], "own"])}
    ordered = sorted(records, key=lambda record: order.get(record.exits, len(order)))
    rows, remarks = [_row(record) for record in ordered], [line for one in ordered for line in _remarks(one)]
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, rows, remarks)


def _row(record: Record) -> tuple[str, ...]:
    pairs = {pair["role"]: pair for pair in record.paired}
    if record.error is not None or record.host_us is None or record.device_us is None:
        return (record.exits, record.variant, "failed", *["-"] * (len(COLUMNS) - 3))
    times = (record.host_us, record.device_us)
    ratios = [f"{pairs['bare'][f'{kind}_ratio']:.3f}" if "bare" in pairs else "-" for kind in ("host", "device")]
    floor = pairs.get("truncated") or pairs.get("segments")
    over = [
        f"{taken['median'] - floor[f'{kind}_us']:+.1f}" if floor else "-"
        for kind, taken in zip(("host", "device"), times, strict=True)
    ]
    throughput = f"{1.0 / floor['device_ratio']:.3f}" if floor else "-"
    return (record.exits, record.variant, *map(percentiles_in_words, times), *ratios, *over, throughput)


def _remarks(record: Record) -> list[str]:
    what = f"{record.variant}, exits {record.exits}"
    if record.error is not None:
        return [f"{what}: {record.error}"]
    counts = record.correctness or {}
    remarks = []
    if counts.get("differing"):
        remarks.append(f"{what}: {counts['differing']} of {counts['samples']} answers differ, all within rounding")
    for pair in record.paired:
        if pair["role"] == "plain":
            ratios = f"{pair['host_ratio']:.3f} to the answer, {pair['device_ratio']:.3f} on the device"
            remarks.append(f"{what}: time over that of {pair['variant']}: {ratios}")
    return remarks


def pareto_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return the same of accuracy against the time to the answer, as an earlier version measured and recorded them."""
    return [_pareto_table(group) for group in latest_by_network(records, "pareto")]


def _pareto_table(records: list[Record]) -> RecordTable:
    cell, environment = records[0].cell, records[0].environment
    title = (
        f"{cell['model']} {cell['dtype']} on {records[0].protocol['data']}, batch {cell['batch']}; "
        f"{environment.get('gpu')}, torch {environment.get('torch')}; host times"
    )
    failed = [f"{one.variant}, {one.exits}: {one.error}" for one in records if one.error is not None]
    return RecordTable(title, _PARETO_COLUMNS, _TEXT_COLUMNS, [_pareto_row(one) for one in records], failed)


def _pareto_row(record: Record) -> tuple[str, ...]:
    measured, host, device = record.measured, record.host_us, record.device_us
    if measured is None or host is None or device is None:
        return (record.exits, record.variant, "failed", *["-"] * (len(_PARETO_COLUMNS) - 3))
    ratios = [f"{pair['mean_host_ratio']:.3f}" for pair in record.paired if pair["role"] == "bare"]
    return (
        record.exits,
        record.variant,
        f"{measured['accuracy']:.2%}",
        f"{measured['mean_host_us']:,.1f}",
        *(ratios or ["-"]),
        f"{host['median']:,.1f}",
        f"{device['median']:,.1f}",
    )
