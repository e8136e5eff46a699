"""Records on disk: lines are whole or absent, whoever writes and whenever it is killed."""

import dataclasses
import gzip
import json
import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from auxhead.autotune.records import forms
from auxhead.autotune.records.record import (
    SCHEMA,
    BadRecord,
    Record,
    append_record,
    bad_record,
    check_out,
    is_settled,
    latest,
    read_records,
    records_path,
)
from auxhead.kernels.launch.head_shape import DTYPES, LAYOUTS, REDUCTIONS, HeadShape

ENVIRONMENT = {"gpu": "H200", "driver": "580", "torch": "2.11", "triton": "3.6", "cudnn": 91900, "cuda": "13.0"}

CELL = {
    "model": "resnet18", "dtype": "float16", "batch": 1, "classes": 10, "placement": "own", "taps": ["layer1"],
    "input": [3, 8, 8],
}  # fmt: skip


def record(variant="graph-bare@as_is", **changed):
    made = Record(
        kind="bench",
        cell=CELL,
        exits="never",
        variant=variant,
        run="r",
        utc="2026-01-01T00:00:00+00:00",
        environment={**ENVIRONMENT, "commit": "abc", "clocks": None},
        protocol={"rounds": 50, "captures": 5},
        host_us={"median": 2.0, "p20": 1.0, "p80": 3.0, "captures": [2.0]},
        device_us={"median": 1.0, "p20": 1.0, "p80": 1.0, "captures": [1.0]},
    )
    return dataclasses.replace(made, **changed)


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    written = [record(), record("polled@cudnn", error="OutOfMemoryError: é\n2", host_us=None, device_us=None)]
    for one in written:
        append_record(path, one)
    assert read_records(path) == written
    assert path.read_bytes().count(b"\n") == 2
    later = {**dataclasses.asdict(record()), "field of a later version": 1}
    path.write_text(json.dumps(later) + "\n")
    assert read_records(path) == [record()]


@pytest.mark.parametrize("torn", [1, 60, 65_534, 65_535, 65_536, 65_537, 131_072, 131_073])
def test_a_torn_last_line_is_ignored_and_then_removed(tmp_path, torn):
    """The file is read from its end on in blocks of 65,536 bytes, at whose edges a newline may lie."""
    path = tmp_path / "a" / "b" / "records.jsonl"
    append_record(path, record("a"))
    whole = path.read_bytes()
    for end in ((whole * 500)[:torn].replace(b"\n", b" "), "é".encode()[:1], whole[:-1]):
        path.write_bytes(whole + end)
        assert [one.variant for one in read_records(path)] == ["a"]
        append_record(path, record("b"))
        assert path.read_bytes().startswith(whole) and len(path.read_bytes()) == 2 * len(whole)
        assert [one.variant for one in read_records(path)] == ["a", "b"]
    path.write_bytes(b"x" * torn)
    assert read_records(path) == []
    append_record(path, record())
    assert read_records(path) == [record()]


def test_two_processes_append_to_one_file(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, record("first"))
    code = f"""
import sys
from pathlib import Path
from auxhead.autotune.records.record import append_record, read_records
path = Path({str(path)!r})
one = read_records(path)[0]
import dataclasses
for turn in range(50):
    append_record(path, dataclasses.replace(one, variant=f"{{sys.argv[1]}}-{{turn}}", notes=["x" * 5000]))
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "ab"]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    variants = [one.variant for one in read_records(path)]
    assert sorted(variants) == sorted(["first", *(f"{name}-{turn}" for name in "ab" for turn in range(50))])
    assert [name for name in variants if name[0] == "a"] == [f"a-{turn}" for turn in range(50)]


def test_compressed_records_are_read_and_not_added_to(tmp_path):
    append_record(tmp_path / "records.jsonl", record())
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(gzip.compress((tmp_path / "records.jsonl").read_bytes()))
    assert read_records(path) == [record()]
    with pytest.raises(BadRecord, match=r"only read, wants a file that lines are added to: records\.jsonl$"):
        check_out(path)
    with pytest.raises(BadRecord, match="is a folder, wants a file"):
        check_out(tmp_path)
    check_out(tmp_path / "records.jsonl")
    assert records_path(tmp_path, "bench", "H200") == tmp_path
    assert records_path(None, "bench", "NVIDIA H200 (80G)") == Path("autotune-records/bench-nvidia-h200-80g.jsonl")


def test_what_is_no_record(tmp_path):
    path = tmp_path / "records.jsonl"
    with pytest.raises(BadRecord, match="no such file"):
        read_records(path)
    with pytest.raises(BadRecord, match="cannot be read"):
        read_records(tmp_path)
    good = json.dumps(dataclasses.asdict(record()))
    for bad, message in (
        ("[]", "line 2: got schema None, wants 'auxhead record 1'"),
        (good.replace("record 1", "record 9"), "line 2: got schema 'auxhead record 9'"),
        ('{"schema": "auxhead record 1"}', "line 2: kind: got nothing, wants text"),
        (json.dumps({**json.loads(good), "cell": None}), "line 2: cell: got None, wants an object"),
        (json.dumps({**json.loads(good), "host_us": 3}), "line 2: host_us: got 3, wants an object"),
        (json.dumps({**json.loads(good), "paired": {}}), "line 2: paired: got {}, wants a list"),
        (json.dumps({**json.loads(good), "utc": 7}), "line 2: utc: got 7, wants text"),
        ("[" * 200_000, "line 2: is not JSON"),
    ):
        path.write_text(f"{good}\n{bad}\n{good}\n")
        with pytest.raises(BadRecord, match=message):
            read_records(path)


def test_nothing_is_written_of_a_number_that_is_none(tmp_path):
    path = tmp_path / "records.jsonl"
    with pytest.raises(BadRecord, match="not a record"):
        append_record(path, record(host_us={"median": float("nan")}))
    assert not path.exists()


def test_latest_prefers_a_measurement_to_a_later_failure():
    old, new, failed = record(run="1"), record(run="2"), record(run="3", error="x")
    other = record(environment={**ENVIRONMENT, "gpu": "H100"})
    assert latest([old, other, new, failed]) == [new, other]
    assert latest([failed, new]) == [new]
    assert latest([record(run="0", error="x"), failed]) == [failed]


def test_settled():
    now = {**ENVIRONMENT, "commit": "def"}
    assert is_settled(record(), now, 50)  # whatever the commit
    assert not is_settled(record(), now, 51)
    assert not is_settled(record(), {**now, "driver": "590"}, 50)
    failed = record(error="x")
    assert is_settled(failed, {**ENVIRONMENT, "commit": "abc"}, 50)
    assert not is_settled(failed, now, 50)
    for commit in (None, "abc-dirty"):
        again = record(error="x", environment={**ENVIRONMENT, "commit": commit})
        assert not is_settled(again, {**ENVIRONMENT, "commit": commit}, 50)


SWEPT = {
    "kind": "sweep",
    "cell": {
        "samples": 8, "channels": 64, "height": 1, "width": 49, "grid_h": 1, "grid_w": 1, "layout": "channels_last",
        "pool": "avg", "classes": 10, "dtype": "float16",
    },
    "exits": "never", "variant": "a", "run": "r", "utc": "", "environment": {},
    "protocol": {"place": "alone", "kernel": "0", "captures": 2, "rounds": 1},
    "device_us": {"median": 1.5, "samples": [[1.0], [2.0]]},
    "paired": [{"role": "rule", "variant": "a", "samples": [[1.0], [2.0]]}],
}  # fmt: skip
DAMAGED = [
    (("cell", "samples"), 0, "cell.samples: got 0, wants a positive whole number"),
    (("cell", "width"), "49", "cell.width: got '49', wants a positive whole number"),
    (("cell", "layout"), None, "cell.layout: got None, wants one of channels_last, contiguous, strided"),
    (("protocol", "place"), None, "protocol.place: got None, wants text"),
    (("protocol", "rounds"), 1.5, "protocol.rounds: got 1.5, wants a positive whole number"),
    (("protocol", "kernel"), 1, "protocol.kernel: got 1, wants text"),
    (("environment",), {"sm_count": {}}, "environment.sm_count: got {}, wants text, a number or null"),
    (("device_us", "samples"), [[1.0], [-1.0]], "device_us.samples: got [[1.0], [-1.0]], wants [captures]"),
    (("device_us", "samples"), [[1.0], [math.nan]], "device_us.samples: got [[1.0], [nan]], wants [captures]"),
    (("device_us", "samples"), [[1.0], [True]], "device_us.samples: got [[1.0], [True]], wants [captures]"),
    (("device_us", "samples"), [[1.0]], "device_us.samples: got [[1.0]], wants [captures]"),
    (
        ("device_us", "samples"),
        [[1.0, 1.0]] * 2,
        "paired: got rounds [2, 1], wants the rule's alone, of as many",
    ),
    (("device_us", "samples"), [[1.0], []], "device_us.samples: got [[1.0], []], wants [captures]"),
    (("paired", 0, "role"), "a", "paired[0].role: got 'a', wants one of rule"),
    (("paired",), SWEPT["paired"] * 2, "paired: got rounds [1, 1, 1], wants the rule's alone"),
    (("paired", 0), 1, "paired[0]: got 1, wants an object"),
    (("paired", 0, "samples"), {}, "paired[0].samples: got {}, wants [captures]"),
    (("paired", 0, "variant"), 1, "paired[0].variant: got 1, wants text"),
]


def test_what_sweeps_must_hold_is_checked_where_it_is_read(tmp_path):
    path, whole = tmp_path / "records.jsonl", json.dumps({**SWEPT, "schema": SCHEMA})
    for keys, to, message in DAMAGED:
        inner = damaged = json.loads(whole)
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to
        path.write_text(f"{whole}\n{json.dumps(damaged)}\n")
        with pytest.raises(BadRecord, match=re.escape(f"{path}, line 2: ")) as caught:
            read_records(path)
        assert message in str(caught.value)
    path.write_text(f"{whole}\n")
    (read,) = read_records(path)
    assert read.place == f"{path}, line 1"


def test_all_that_tells_heads_apart_is_checked():
    """Written out where it is checked, since what knows it imports torch."""
    assert forms.SHAPE == HeadShape._fields
    assert forms.WORDS == {"layout": LAYOUTS, "pool": REDUCTIONS, "dtype": DTYPES}


def test_everybody_may_read_a_file_and_its_owner_write_it(tmp_path):
    before = os.umask(0)
    try:
        append_record(tmp_path / "records.jsonl", record())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "records.jsonl").stat().st_mode) == 0o644


def test_a_bad_record_is_named_by_its_place_or_else_by_its_variant():
    assert str(bad_record(record("a"), "no")) == "a: no"
    assert str(bad_record(record("a", place="file, line 3"), "no")) == "file, line 3: no"
