"""Every command that reads records names a damaged file, and the line, in one line."""

import gzip
import json

import pytest
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import COMMITTED
from support.command_line import assert_one_line_error, plot, tune

LINE = (COMMITTED / "h200/heads.jsonl").read_text().splitlines()[0]


def without_cell(kind):
    return json.dumps({**{name: value for name, value in json.loads(LINE).items() if name != "cell"}, "kind": kind})


def commands(path):
    """Each command that reads records, by name."""
    yield "table", lambda: tune("table", path)
    yield "promote", lambda: tune("promote", path, "--out", path.parent / "table.json")
    yield "replay", lambda: tune("sweep", "resnet18", "--replay", path)
    yield "perfetto", lambda: plot("perfetto", path, "--out", path.parent / "trace.json")
    for kind in FIGURES:
        if kind.name not in ("exits", "calibration"):  # of reports, not of records
            yield kind.name, lambda kind=kind: plot(kind.name, "--records", path, "--out", path.parent / "figure")


DAMAGED = {
    "no-cell": ((LINE + "\n" + without_cell("sweep") + "\n").encode(), ", line 2: cell: got nothing, wants an object"),
    "no-json": (f"{LINE}\n{LINE[:100]}\n{LINE}\n".encode(), ", line 2: is not JSON ("),
    "no-text": (f"{LINE}\n".encode() + b"\xff\xfe\n", ", line 2: is not JSON ('utf-8' codec"),
    "no-gzip": (b"not compressed at all\n", ", line 1: is not JSON ("),
    "half-gzip": (gzip.compress(LINE.encode() * 50)[:-20], ": is compressed and cannot be read (Compressed file ended"),
    "other-gzip": (gzip.compress(LINE.encode())[:10] + b"x" * 50, ": is compressed and cannot be read ("),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_records_are_named_with_file_and_line(content, message, tmp_path):
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(content)
    for name, run in commands(path):
        result = run()
        assert_one_line_error(result, f"{path}{message}")
        assert sorted(tmp_path.iterdir()) == [path], name


@pytest.mark.parametrize("content", [b"", b"not a line", gzip.compress(b"")], ids=["empty", "no-line", "empty-gzip"])
def test_files_without_records_are_named(content, tmp_path):
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(content)
    for name, run in commands(path):
        result = run()
        assert_one_line_error(result, str(path))
        assert sorted(tmp_path.iterdir()) == [path], name
