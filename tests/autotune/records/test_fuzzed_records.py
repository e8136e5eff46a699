"""Records whose bytes or JSON are damaged, kind by kind: read and tabulated, or refused with file and line."""

import gzip
import json
import random
import re
import tracemalloc

import pytest
from auxhead.autotune.__main__ import _sweep_tables, tables
from auxhead.autotune.records import record as record_format
from auxhead.autotune.records.record import BadRecord, made_of, read_records
from auxhead.autotune.records.tables import as_markdown
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.figures.reports import read
from auxhead.plots.records import COMMITTED
from support.damaged import damaged_bytes, damaged_json, read_damaged

MAKERS = {**tables, "sweep": _sweep_tables}
FILES = ("bench", "footprint", "heads", "overlap", "profile", "sweep")


def first_lines(name):
    path = COMMITTED / "h200" / f"{name}.jsonl"
    opened = path.open("rb") if path.exists() else gzip.open(path.with_suffix(".jsonl.gz"), "rb")
    with opened as file:
        return [file.readline().strip() for _ in range(2)]


@pytest.mark.parametrize("name", FILES)
def test_any_damage(name, tmp_path):
    path, lines = tmp_path / "records.jsonl", first_lines(name)
    read = 0
    for seed in range(80):
        dice = random.Random(seed)
        damaged = damaged_bytes(lines[1], dice) if seed % 4 == 0 else damaged_json(json.loads(lines[1]), dice)
        content = b"\n".join([lines[0], damaged, b""])
        content = damaged_bytes(gzip.compress(content), dice) if seed % 10 == 0 else content

        def tabulated():
            with made_of([path]):
                records = read_records(path)
                of_kinds = [make(records) for kind, make in MAKERS.items() if any(one.kind == kind for one in records)]
                return [as_markdown(one) for made in of_kinds for one in made]

        read += read_damaged(path, content, tabulated, BadRecord, path) is not None
    assert 5 < read < 60


#: A number, perhaps with a unit or words behind it.
NUMBER = re.compile(r"[<+-]?[\d,]+(\.\d+)?(%| |$)")


@pytest.mark.parametrize("file", ["bench", "footprint", "heads", "overlap", "pipelines", "doctor"])
def test_columns_of_text_come_first_and_end_where_those_of_numbers_begin(file):
    records = read_records(COMMITTED / f"h200/{file}.jsonl")
    for table in MAKERS[file.removesuffix("s") if file == "pipelines" else file](records):
        columns = [*zip(*table.rows, strict=True)]
        assert not all(map(NUMBER.match, columns[table.text_columns - 1])), table.title
        for column in columns[table.text_columns :]:
            assert all(cell in ("", "-", "failed") or cell.lstrip("<+-")[0].isdigit() for cell in column), table.title


def test_any_damage_of_a_report(tmp_path):
    path, whole = tmp_path / "report.json", (COMMITTED / "cpu" / "demo-digits.json").read_bytes()
    found = []
    for seed in range(200):
        dice = random.Random(seed)
        content = damaged_bytes(whole, dice) if seed % 4 == 0 else damaged_json(json.loads(whole), dice)
        found.append(read_damaged(path, content, lambda: read([path], ["demo"], {}), BadRecord, path))
    kept = [one for one in found if one is not None]
    assert 5 < len(kept) < 190
    for one in kept[:3]:
        FIGURES["exits"].draw(one)


def test_a_small_file_that_unpacks_to_more_than_there_is_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(record_format, "MOST_BYTES", 10_000)
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 10_000_000 + b"\n"))
    tracemalloc.start()
    with pytest.raises(BadRecord, match=r"records.jsonl.gz: holds more than 10,000 bytes"):
        read_records(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 5_000_000, "all of it was unpacked"
