"""Every command that reads records names a damaged file, and the line, in one line."""

import gzip
import json

import pytest
import typer
from auxhead.autotune.records.tables import table_command
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import COMMITTED
from support.command_line import assert_one_line_error, plot, tune
from typer.testing import CliRunner

LINE = (COMMITTED / "h200/heads.jsonl").read_text().splitlines()[0]


def without_cell(kind):
    return json.dumps({**{name: value for name, value in json.loads(LINE).items() if name != "cell"}, "kind": kind})


def commands(path):
    """Each command that reads records, by name."""
    yield "table", lambda: tune("table", path)
    yield "promote", lambda: tune("promote", path, "--out", path.parent / "table.json")
    yield "perfetto", lambda: plot("perfetto", path, "--out", path.parent / "trace.json")
    for kind in FIGURES.values():
        if kind.name not in ("exits", "calibration", "anytime"):  # of reports, not of records
            yield kind.name, lambda kind=kind: plot(kind.name, "--records", path, "--out", path.parent / "figure")


DAMAGED = {
    "no-cell": ((LINE + "\n" + without_cell("sweep") + "\n").encode(), ", line 2: cell: got nothing, wants an object"),
    "no-schema": (b"{}\n", ", line 1: got schema None"),
    "no-json": (f"{LINE}\n{LINE[:100]}\n{LINE}\n".encode(), ", line 2: is not JSON ("),
    "no-text": (f"{LINE}\n".encode() + b"\xff\xfe\n", ", line 2: is not JSON ('utf-8' codec"),
    "no-gzip": (b"not compressed at all\n", ", line 1: is not JSON ("),
    "half-gzip": (gzip.compress(LINE.encode() * 50)[:-20], ": is compressed and cannot be read (Compressed file ended"),
    "other-gzip": (gzip.compress(LINE.encode())[:10] + b"x" * 50, ": is compressed and cannot be read ("),
    "empty": (b"", ""),  # of which each command says something else
    "no-line": (b"not a line", ""),
    "empty-gzip": (gzip.compress(b""), ""),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_records_are_named_with_file_and_line(content, message, tmp_path):
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(content)
    for name, run in commands(path):
        result = run()
        assert_one_line_error(result, f"{path}{message}")
        assert sorted(tmp_path.iterdir()) == [path], name


@pytest.mark.parametrize(
    ("figure", "name", "change"),
    [
        ("calibration", "cpu/calibration-digits.json", lambda report: report["exits"][0]["before"]["samples"].pop()),
        ("calibration", "cpu/calibration-digits.json", lambda report: report.update(chosen=2**62)),
        ("anytime", "cpu/anytime-digits.json", lambda report: report["alone"]["path"][0]["interval"].pop()),
    ],
)
def test_lists_of_several_lengths_and_absurd_numbers_end_a_figure_in_one_line(figure, name, change, tmp_path):
    path = tmp_path / name.rpartition("/")[2]
    if path.suffix == ".json":
        content = json.loads((COMMITTED / name).read_text())
        change(content)
        path.write_text(json.dumps(content))
    else:
        records = [json.loads(line) for line in (COMMITTED / name).read_text().splitlines()]
        for record in records:
            if record["kind"] == figure:
                change(record)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    result = plot(figure, "--records", path, "--out", tmp_path / "figure")
    assert_one_line_error(result, str(path))
    assert list(tmp_path.iterdir()) == [path]


def test_whatever_a_table_stumbles_over_is_one_line(tmp_path):
    def stumbles(_records):
        raise ZeroDivisionError("of numbers that no check knows")

    path = tmp_path / "records.jsonl"
    path.write_text(LINE + "\n")
    app = typer.Typer(callback=lambda: None)
    app.command()(table_command(heads=stumbles, other=stumbles))
    result = CliRunner().invoke(app, ["table", str(path)])
    assert_one_line_error(result, f"{path}: nothing can be made of what it holds (ZeroDivisionError('of numbers")
