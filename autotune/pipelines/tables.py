"""Tables of pipelines: images a second of every variant, beside the bound, the network on one GPU and the baselines."""

from collections.abc import Iterable, Sequence

from ..records.record import Record
from ..records.summaries import Percentiles
from ..records.tables import RecordTable, latest_by_network, network_in_words, percentiles_in_words

COLUMNS = (
    "variant",
    "leave on the first GPU",
    "images/s",
    "/ one GPU",
    "/ model-parallel",
    "/ bound",
    "stages on the GPU, ms",
    "link, ms",
)
_TEXT_COLUMNS = 2


def pipeline_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return one table for each batch and environment, of the last measurement of each variant.

    The bound is that of the stages' graphs and the link alone, see ``pieces``.
    """
    return [_table(group) for group in latest_by_network(records, "pipeline")]


def _table(records: Sequence[Record]) -> RecordTable:
    base = {one.variant: one.measured["images_s"]["median"] for one in records if one.measured is not None}
    remarks = [f"{one.variant}, exits {one.exits}: {one.error}" for one in records if one.error is not None]
    title = f"{network_in_words(records[0])}; {records[0].protocol['devices']} GPUs; median (20th to 80th percentile)"
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, [_row(one, base) for one in records], remarks)


def _row(record: Record, base: dict[str, float]) -> tuple[str, ...]:
    measured = record.measured
    leaves = "-" if record.exits == "never" else f"{record.exits.partition('/')[0]} %"
    if measured is None:
        return (record.variant, leaves, "failed", *["-"] * (len(COLUMNS) - 3))
    images = measured["images_s"]
    over = [f"{images['median'] / base[name]:.2f}" if base.get(name) else "-" for name in ("one-gpu", "model-parallel")]
    bound, pieces = measured.get("bound_images_s"), measured.get("pieces", {})
    return (
        record.variant,
        leaves,
        percentiles_in_words({name: images[name] for name in Percentiles._fields}),
        *over,
        f"{images['median'] / bound:.2f}" if bound else "-",
        *(_list(pieces.get(name)) for name in ("graph_ms", "link_ms")),
    )


def _list(values: Sequence[float] | None) -> str:
    return "-" if values is None else ", ".join(f"{one:.3f}" for one in values)
