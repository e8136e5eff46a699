"""Tables of the benchmark's records: times of every variant, beside the bare trunk and the floor; and of pipelines."""

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
_PIPELINE_COLUMNS = ("variant", "images/s", "/ one GPU", "/ model-parallel")


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


def pipeline_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return tables of images a second over two GPUs, as ``studies.pipelines`` records them."""
    return [_pipeline_table(group) for group in latest_by_network(records, "pipeline")]


def _pipeline_table(records: Sequence[Record]) -> RecordTable:
    base = {one.variant: one.measured["images_s"]["median"] for one in records if one.measured is not None}
    remarks = [f"{one.variant}: {one.error}" for one in records if one.error is not None]
    title = f"{network_in_words(records[0])}; {records[0].protocol['devices']} GPUs; median (20th to 80th percentile)"
    return RecordTable(title, _PIPELINE_COLUMNS, 1, [_pipeline_row(one, base) for one in records], remarks)


def _pipeline_row(record: Record, base: dict[str, float]) -> tuple[str, ...]:
    measured = record.measured
    if measured is None:
        return (record.variant, "failed", "-", "-")
    images = measured["images_s"]
    over = [f"{images['median'] / base[name]:.2f}" if base.get(name) else "-" for name in ("one-gpu", "model-parallel")]
    return (record.variant, percentiles_in_words(images), *over)
