"""Summaries of timings, and values as records hold them; groups of records."""

from typing import NamedTuple

from auxhead.autotune.records.record import Record
from auxhead.autotune.records.summaries import as_json, network_record, rounded, summary, with_samples
from auxhead.autotune.records.tables import latest_by_network, network_in_words
from support.cost_records import ENVIRONMENT

CELL = {
    "model": "resnet18", "dtype": "float16", "batch": 8, "classes": 10, "taps": ["layer1", "layer2"],
    "input": [3, 224, 224], "placement": "blocks",
}  # fmt: skip


class Pair(NamedTuple):
    us: float
    inner: object


def test_times_are_summarised_over_all_captures_and_in_each():
    times = [[3.0, 1.0], [], [2.0, 8.0, 5.0]]
    assert summary(times) == {"median": 3.0, "p20": 2.0, "p80": 5.0, "captures": [2.0, 5.0]}
    assert with_samples([[1.0], [2.0]])["samples"] == [[1.0], [2.0]]
    assert rounded([[1.26, 2.0], [0.04]], 1) == [[1.3, 2.0], [0.0]]


def test_values_become_what_json_holds():
    value = {
        "pair": Pair(1.23456789, (0.00000049, 1 / 3)),
        "list": [Pair(1.0, None)],
        "text": "a",
        "count": 3,
        "yes": True,
    }
    assert as_json(value) == {
        "pair": {"us": 1.234568, "inner": [0.0, 0.333333]},
        "list": [{"us": 1.0, "inner": None}],
        "text": "a",
        "count": 3,
        "yes": True,
    }
    assert as_json(value)["yes"] is True


def made(variant="overlapped", kind="bench", cell=CELL, **rest) -> Record:
    return network_record(kind, cell, variant, rest.pop("environment", ENVIRONMENT), run="r", protocol={}, **rest)


def test_the_last_record_of_each_thing_is_grouped_by_network_and_environment():
    turned = dict(reversed(CELL.items()))
    elsewhere = {**ENVIRONMENT, "gpu": "NVIDIA X200"}
    older, newer, plain = made(), made(cell=turned, notes=["again"]), made("graph-bare")
    large, other = made(cell={**CELL, "batch": 32}), made(environment=elsewhere)
    found = latest_by_network([older, large, newer, made(kind="pareto"), plain, other], "bench")
    assert found == [[newer, plain], [large], [other]]
    assert latest_by_network([made(kind="pareto")], "bench") == []
    assert network_in_words(newer) == (
        "resnet18 float16, batch 8, 10 classes, 2 heads (blocks), 3x224x224; NVIDIA X100, torch 2.11.0"
    )
    assert newer.exits == "never" and newer.cell is not turned
