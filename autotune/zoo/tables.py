"""Tables of the zoo's records: a network and batch a row, the default runner beside torch.compile, graph and eager."""

from collections.abc import Iterable, Mapping

from ..measuring.cells import DEFAULT
from ..records.record import Record, grouped
from ..records.tables import RecordTable

KIND = "zoo"
AGAIN = f"{DEFAULT}, next process"
COMPILED = "compile-bare-reduce-overhead@as_is"
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


def zoo_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return a table for each environment, of the last run of each network and batch."""
    tables = []
    for its in grouped((one for one in records if one.kind == KIND), lambda one: one.environment_key).values():
        cells = grouped(its, lambda one: (f"{one.cell['model']}", f"{one.cell['batch']}"))
        last = {cell: {one.variant: one for one in found} for cell, found in cells.items()}
        rows = [_row(*cell, found) for cell, found in last.items()]
        where = its[-1].environment
        title = f"make_runner by default, three heads, no image leaves; {where.get('gpu')}, torch {where.get('torch')}"
        remarks = [
            f"{model}, batch {batch}, {one.variant}: {one.error}"
            for (model, batch), found in last.items()
            for one in found.values()
            if one.error is not None
        ]
        tables.append(RecordTable(title, _COLUMNS, 1, rows, [*remarks, *_in_words(last)]))
    return tables


def _us(found: Mapping[str, Record], variant: str, kind: str = "device") -> float | None:
    record = found.get(variant)
    times = None if record is None or record.error is not None else getattr(record, f"{kind}_us")
    return None if times is None else float(times["median"])


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _row(model: str, batch: str, found: Mapping[str, Record]) -> tuple[str, ...]:
    graph = "graph-bare@as_is"
    device = [_us(found, name) for name in (DEFAULT, COMPILED, graph)]
    host = [_us(found, name, "host") for name in (DEFAULT, COMPILED)]
    eager = _ratio(*(_us(found, name, "host") for name in ("eager@as_is", "eager-bare@as_is")))
    first = [_measured(found, name, "first_answer_s") for name in (DEFAULT, AGAIN, COMPILED)]
    ratios = [_ratio(device[0], other) for other in device[1:]]
    joules = _ratio(*(_measured(found, name, "joules") for name in (DEFAULT, COMPILED)))
    return (
        model, batch, _chosen(found), *(_number(one, ",.1f") for one in device),
        *(_number(one, ".2f") for one in ratios), *(_number(one, ",.1f") for one in host),
        _number(_ratio(*host), ".2f"), *(_number(one, ".1f") for one in first),
        _number(joules, ".2f"), _number(eager, ".2f"),
    )  # fmt: skip


def _chosen(found: Mapping[str, Record]) -> str:
    """Return the runner and trunk that were chosen, as the plan has it."""
    notes = found[DEFAULT].notes if DEFAULT in found else []
    _, _, said = notes[0].partition("Batch ") if notes else ("", "", "")
    return said.partition(": ")[2].partition(", measured")[0] or "-"


def _measured(found: Mapping[str, Record], variant: str, name: str) -> float | None:
    """Return a further measurement of a variant, of several captures the first one's."""
    value = ((found[variant].measured if variant in found else None) or {}).get(name)
    return value[0] if isinstance(value, list) else value


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _in_words(cells: Mapping[tuple[str, str], Mapping[str, Record]]) -> list[str]:
    """Say how the runner compares with torch.compile over all cells."""
    ratios = [one for found in cells.values() if (one := _ratio(_us(found, DEFAULT), _us(found, COMPILED)))]
    if not ratios:
        return ["No network was timed beside torch.compile."]
    as_fast, ordered = sum(one <= 1.0 for one in ratios), sorted(ratios)
    median = ordered[len(ordered) // 2]
    return [
        f"At least as fast as torch.compile of the bare backbone on the device in {as_fast} of {len(ratios)}; "
        f"{median:.2f} of its time in the median, {ordered[0]:.2f} to {ordered[-1]:.2f}."
    ]
