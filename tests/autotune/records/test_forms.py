"""Forms of records: what tables and figures read is checked when files are read, and that is all that they read."""

import dataclasses
import json
import re

import pytest
from auxhead.autotune.__main__ import tables
from auxhead.autotune.records import forms
from auxhead.autotune.records.checks import OBJECT, TEXT, Maybe, Roles
from auxhead.autotune.records.record import SCHEMA, BadRecord, read_records
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import COMMITTED
from support.command_line import plot, tune
from support.pipeline_records import pipeline_records

#: Files with records of each kind; of sweeps the first lines of a head in both places.
FILES = {
    "bench": "bench", "heads": "heads", "overlap": "overlap", "timeline": "overlap", "footprint": "footprint",
    "pareto": "pareto", "profile": "profile", "doctor": "doctor",
}  # fmt: skip
#: Kinds that ``auxhead-tune table`` knows.
TABLES = ("bench", "heads", "pareto", "overlap", "footprint", "pipeline")
#: Kinds without committed records.
MADE_UP = ("pipeline", "gpus")


@pytest.fixture(scope="module")
def lines():
    """Committed records by kind, as JSON holds them."""
    found = {}
    for kind, name in FILES.items():
        records = [json.loads(line) for line in (COMMITTED / f"h200/{name}.jsonl").read_text().splitlines()]
        found[kind] = [one for one in records if one["kind"] == kind and one["error"] is None]
    for kind in MADE_UP:
        found[kind] = [dataclasses.asdict(one) for one in pipeline_records() if one.kind == kind]
    return found


def form_of(kind):
    """All forms of a kind in one."""
    parts = forms._RECORD, forms._KINDS[kind].always, forms._KINDS[kind].measured
    return merged(*parts)


def merged(*parts):
    if all(isinstance(one, dict) for one in parts):
        names = dict.fromkeys(name for one in parts for name in one)
        return {name: merged(*(one[name] for one in parts if name in one)) for name in names}
    return parts[-1]


def pruned(value, form):
    """What the form asks for of a value, and nothing else."""
    if isinstance(form, dict):
        needed = {name: one for name, one in form.items() if not isinstance(one, Maybe) or not one.absent}
        return {name: pruned(value[name], one) for name, one in needed.items()}
    if isinstance(form, Maybe):
        return None if value is None else pruned(value, form.form)
    if isinstance(form, list):
        return [pruned(one, form[0]) for one in value]
    if isinstance(form, Roles):
        known = {**form.others, **form.wanted}
        return [{"role": one["role"], **pruned(one, known[one["role"]])} for one in value if one["role"] in known]
    return value


def written(path, *values):
    path.write_text("".join(json.dumps({**one, "schema": SCHEMA}) + "\n" for one in values))
    return path


@pytest.mark.parametrize("file", sorted({kind.file for kind in FIGURES.values() if kind.file.endswith(".jsonl")}))
def test_what_is_checked_is_all_that_tables_and_figures_read(file, lines, tmp_path):
    """Records that hold nothing else are enough for them."""
    kinds = [kind for kind in FILES if file == f"h200/{FILES[kind]}.jsonl"]
    kinds = [*MADE_UP] if file == "h200/pipelines.jsonl" else kinds
    made = []
    for kind in kinds:
        for one in lines[kind]:
            made.append(pruned(one, form_of(kind)))
            made[-1]["environment"] |= {"gpu": "X"}
            if kind == "heads" and one["variant"] == "bytes":
                made[-1]["protocol"] |= pruned(one["protocol"], {"bytes": 0, "bytes_per_second": 0})
            if kind == "bench" and "p99" in one["host_us"]:
                made[-1]["host_us"]["p99"] = one["host_us"]["p99"]
    path = written(tmp_path / "records.jsonl", *made)
    if set(kinds) & set(TABLES):
        printed = tune("table", path)
        assert printed.exit_code == 0, printed.output
    for figure in FIGURES.values():
        if file == figure.file:
            drawn = plot(figure.name, "--records", path, "--out", tmp_path / "figure")
            assert drawn.exit_code == 0, (figure.name, drawn.output, drawn.exception)


def damaged(value, form):
    """Yield the name of each field and the value with that field gone, or of another form."""
    if isinstance(form, Maybe):
        yield from damaged(value, form.form) if value is not None else ()
    elif isinstance(form, dict):
        for name, inner in form.items():
            may_be = inner.form if isinstance(inner, Maybe) else inner
            if not isinstance(inner, Maybe) or not inner.absent:
                yield name, {other: one for other, one in value.items() if other != name}
            yield name, {**value, name: [] if may_be is OBJECT or isinstance(may_be, dict) else {"no": "such"}}
            for where, changed in damaged(value.get(name), inner):
                yield where or name, {**value, name: changed}
    elif isinstance(form, (list, Roles)):
        for place, one in enumerate(value[:2]):
            roles = {} if isinstance(form, list) else {**form.others, **form.wanted}
            inner = form[0] if isinstance(form, list) else {"role": TEXT, **roles[one["role"]]}
            for where, changed in [("", [1j]), *damaged(one, inner)]:
                yield where, [*value[:place], {"no": "such"} if changed == [1j] else changed, *value[place + 1 :]]


@pytest.mark.parametrize("kind", [*FILES, *MADE_UP])
def test_every_field_that_is_missing_or_wrong_is_named_with_file_and_line(kind, lines, tmp_path):
    good, path = lines[kind][-1], tmp_path / "records.jsonl"
    found = list(damaged(good, form_of(kind)))
    assert len(found) > 30
    for name, bad in found:
        written(path, good, bad)
        with pytest.raises(BadRecord, match=rf"{path}, line 2: .*{name}.*, wants ") as caught:
            read_records(path)
        assert "\n" not in str(caught.value)


#: A number, perhaps with a unit or words behind it.
NUMBER = re.compile(r"[<+-]?[\d,]+(\.\d+)?(%| |$)")


@pytest.mark.parametrize("kind", [*tables])
def test_columns_of_text_come_first_and_end_where_those_of_numbers_begin(kind, lines, tmp_path):
    for table in tables[kind](read_records(written(tmp_path / "records.jsonl", *lines[kind]))):
        columns = [*zip(*table.rows, strict=True)]
        assert not all(map(NUMBER.match, columns[table.text_columns - 1])), table.title
        for column in columns[table.text_columns :]:
            assert all(cell in ("", "-") or cell.lstrip("<+-")[0].isdigit() for cell in column), table.title
