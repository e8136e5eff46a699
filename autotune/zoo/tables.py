"""Tables of the zoo's records: a network and batch a row, the default runner beside torch.compile, graph and eager."""

import statistics
from collections.abc import Iterable, Sequence

from ..records.record import BadRecord, Record, grouped
from ..records.tables import RecordTable, as_markdown
from ..records.zoo import AGAIN, COMPILED, DEFAULT, GRAPH, KIND, ZooCell, by_model, ratio, summary_of, zoo_cells

_COLUMNS = (
    "network",
    "batch",
    "chosen",
    "device, us: ours",
    "torch.compile",
    "graph",
    "ours / torch.compile",
    "ours / graph",
    "to the answer, us: ours",
    "torch.compile",
    "ours / torch.compile",
    "first answer, s: ours",
    "next process",
    "torch.compile",
    "joules / torch.compile",
    "eager / bare",
)
_NOT_MEASURED = ZooCell("", 0, {})


def zoo_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return a table for each environment, of the last run of each network and batch."""
    tables = []
    for its in grouped((one for one in records if one.kind == KIND), lambda one: one.environment_key).values():
        cells = zoo_cells(its)
        where = its[-1].environment
        title = f"make_runner by default, three heads, no image leaves; {where.get('gpu')}, torch {where.get('torch')}"
        remarks = [
            f"{cell.model}, batch {cell.batch}, {one.variant}: {one.error}"
            for cell in cells
            for one in cell.records.values()
            if one.error is not None
        ]
        tables.append(RecordTable(title, _COLUMNS, 1, [_row(cell) for cell in cells], [*remarks, _in_words(cells)]))
    return tables


def _row(cell: ZooCell) -> tuple[str, ...]:
    device = [cell.us(name) for name in (DEFAULT, COMPILED, GRAPH)]
    ratios = [cell.ratio(to=name) for name in (COMPILED, GRAPH)]
    host = [cell.us(name, "host") for name in (DEFAULT, COMPILED)]
    first = [cell.measured(name, "first_answer_s") for name in (DEFAULT, AGAIN, COMPILED)]
    joules = ratio(*(cell.measured(name, "joules") for name in (DEFAULT, COMPILED)))
    eager = cell.ratio("eager@as_is", "eager-bare@as_is", "host")
    return (
        cell.model, f"{cell.batch}", _chosen(cell), *(_number(one, ",.1f") for one in device),
        *(_number(one, ".2f") for one in ratios), *(_number(one, ",.1f") for one in host),
        _number(ratio(*host), ".2f"), *(_number(one, ".1f") for one in first),
        _number(joules, ".2f"), _number(eager, ".2f"),
    )  # fmt: skip


def _chosen(cell: ZooCell) -> str:
    """Return the runner and trunk that were chosen, as the plan has it."""
    notes = cell.records[DEFAULT].notes if DEFAULT in cell.records else []
    _, _, said = notes[0].partition("Batch ") if notes else ("", "", "")
    return said.partition(": ")[2].partition(", measured")[0] or "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _in_words(cells: Sequence[ZooCell]) -> str:
    """Say how the runner compares with torch.compile over all cells."""
    found = summary_of(cells)
    if found is None:
        return "No network was timed beside torch.compile."
    return (
        f"At least as fast as torch.compile of the bare backbone on the device in {found.as_fast} of {found.cells}; "
        f"{found.median:.2f} of its time in the median, {found.lowest:.2f} to {found.highest:.2f}."
    )


def front_page(records: Iterable[Record]) -> str:
    """Return the table of the front page in Markdown: a network a row, ratios and times by batch, and medians.

    Raises:
        BadRecord: none of a zoo, or those of several devices or versions.
    """
    zoo = [one for one in records if one.kind == KIND]
    environments = {one.environment_key for one in zoo}
    if len(environments) != 1:
        raise BadRecord(f"front_page: got records of {len(environments)} devices and versions, wants those of one")
    cells = zoo_cells(zoo)
    batches = sorted({cell.batch for cell in cells})
    asked = f"at batch {batches[0]}, s"
    columns = ("network", *(f"batch {batch}" for batch in batches), f"first answer {asked}", f"next process {asked}")
    rows = []
    for model, its in by_model(cells).items():
        seconds = [_number(one, ".1f") for one in _first_answers(its.get(batches[0], _NOT_MEASURED))]
        rows.append((model, *(_front_cell(its.get(batch, _NOT_MEASURED)) for batch in batches), *seconds))
    ratios = [[cell.ratio() for cell in cells if cell.batch == batch] for batch in batches]
    firsts = zip(*(_first_answers(cell) for cell in cells if cell.batch == batches[0]), strict=True)
    medians = [*(_number(_median(one), ".2f") for one in ratios), *(_number(_median(one), ".1f") for one in firsts)]
    where = zoo[-1].environment
    title = (
        "make_runner by default, three heads: time on the device over that of torch.compile (reduce-overhead) of the "
        f"backbone without heads, and microseconds; {where.get('gpu')}, torch {where.get('torch')}"
    )
    return as_markdown(RecordTable(title, columns, 1, [*rows, ("median", *medians)], [_in_words(cells)]))


def _front_cell(cell: ZooCell) -> str:
    us = cell.us(DEFAULT)
    if us is None:
        return "failed" if DEFAULT in cell.records else "-"
    return f"{_number(cell.ratio(), '.2f')}, {us:,.0f} us"


def _first_answers(cell: ZooCell) -> tuple[float | None, float | None]:
    first, again = (cell.measured(name, "first_answer_s") for name in (DEFAULT, AGAIN))
    return first, None if first is None else again


def _median(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return statistics.median(known) if known else None
