"""Records that figures are drawn from: those of one device and set of versions, and the small print about them."""

import dataclasses

import pytest
from auxhead.autotune.records.record import append_record
from auxhead.plots.records import NoRecords, most_measured, read_kinds, stamp
from support.cost_records import ENVIRONMENT, record

CELL = {
    "model": "resnet18", "dtype": "float16", "batch": 1, "classes": 10, "taps": ["layer1", "layer2"],
    "input": [3, 224, 224], "placement": "blocks",
}  # fmt: skip
ON = "NVIDIA X100, driver 580, CUDA 13.0, cuDNN 91900, torch 2.11.0, Triton 3.6.0; auxhead 0.1.0"


def measured(variant="a", kind="bench", protocol=None, environment=ENVIRONMENT, cell=CELL, **rest):
    protocol = {"rounds": 30, "captures": 5} if protocol is None else protocol
    made = record(kind, cell, variant, exits="never", protocol=protocol, **rest)
    return dataclasses.replace(made, environment=environment)


@pytest.fixture
def paths(tmp_path):
    """Two files, each with measurements of two kinds; the second one's of its second kind failed."""
    found = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    for path, error in zip(found, (None, "RuntimeError: no"), strict=True):
        for kind in ("x", "y" if error is None else "z"):
            append_record(path, measured(path.stem, kind, error=error if kind == "z" else None))
    return found


def test_records_of_some_kinds_are_read_in_their_order(paths):
    found = read_kinds(paths, ["x", "y"])
    assert [(one.variant, one.kind) for one in found] == [("one", "x"), ("one", "y"), ("two", "x")]
    known = {}
    assert read_kinds(paths, ["x"], known) == [found[0], found[2]] and list(known) == paths
    for path in paths:
        path.write_text("")
    assert [one.variant for one in read_kinds(paths, ["x"], known)] == ["one", "two"], "files are read once"


def test_what_is_missing_is_named(paths):
    with pytest.raises(NoRecords, match=r"one.jsonl, .*two.jsonl: no measurement of kind 'z'$"):
        read_kinds(paths, ["x", "z"])
    gone = paths[0].with_name("gone.jsonl")
    with pytest.raises(NoRecords, match="gone.jsonl: no such file, wants records of kind x, y$"):
        read_kinds([*paths, gone], ["x", "y"])


def at(commit, utc="2026-11-21T12:00:00+00:00"):
    return dataclasses.replace(measured(environment={**ENVIRONMENT, "commit": commit}), utc=utc)


def test_the_small_print_says_where_and_when():
    later = at("fedcba9876543210", "2026-11-23T01:00:00+00:00")
    assert stamp([measured()]) == f"{ON} (012345678), 2026-11-21"
    assert stamp([later, measured()], "first", "second") == (
        f"first\nsecond\n{ON} (012345678, fedcba987), 2026-11-21 to 2026-11-23"
    )
    days = [at("a", f"2026-11-{day}T00:00:00+00:00") for day in (22, 24, 23)]
    assert stamp(days).endswith(", 2026-11-22 to 2026-11-24")
    assert "(a, b, c), " in stamp([at(name) for name in "cabba"]) and "(?), " in stamp([at(None)])
    assert "(4 commits), " in stamp([at(name) for name in "abcd"])


def test_the_network_with_most_measurements_and_the_last_of_each():
    other = {**CELL, "model": "resnet50"}
    again = measured("a", notes=["again"])
    records = [
        measured("a", cell=other), measured("a"), measured("c"), measured("b"), again,
        measured("b", cell=other, error="x"), measured("c", cell=other), measured("d", cell=other),
    ]  # fmt: skip
    network, found = most_measured(records, ("a", "b"), "it")
    assert network.model == "resnet18" and found == [again, records[3]]
    with pytest.raises(NoRecords, match=r"^no record of the thing \(variants x, y\)$"):
        most_measured(records, ("x", "y"), "the thing")
