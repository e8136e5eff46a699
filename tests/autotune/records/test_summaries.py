"""Summaries of timings, values as records hold them, groups of records; unions of intervals; forms of fields."""

import math
import random
from typing import NamedTuple

from auxhead.autotune.records import checks
from auxhead.autotune.records.intervals import common, length, merged
from auxhead.autotune.records.record import Record
from auxhead.autotune.records.summaries import (
    as_json,
    p99,
    percentiles,
    rounded,
    summary,
    with_samples,
)
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
    return Record(kind, cell, variant, "r", rest.pop("environment", ENVIRONMENT), {}, **rest)


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
    assert newer.exits == "never"


def test_spread():
    assert percentiles([5.0]) == (5.0, 5.0, 5.0)
    assert percentiles(range(100, -1, -1)) == (50, 20, 80)


def test_99_of_100_lie_below_the_99th_percentile():
    """By linear interpolation between the ordered values, as NumPy's."""
    assert p99(range(101)) == 99.0 and p99([*range(100, -1, -1)]) == 99.0
    assert abs(p99([1.0, 2.0]) - 1.99) < 1e-12
    assert abs(p99([0.0] * 9 + [100.0]) - 91.0) < 1e-9, "below a hundred little less than their maximum"


def units(intervals):
    return {unit for begin, end in intervals for unit in range(int(begin), int(end))}


def test_they_hold_the_units_of_time_that_theirs_do():
    draw = random.Random(0)
    for _ in range(300):
        first, second = (
            [(begin, begin + draw.randint(0, 6)) for begin in (draw.randint(0, 30) for _ in range(draw.randint(0, 6)))]
            for _ in range(2)
        )
        unions = [merged(one) for one in (first, second)]
        for one, union in zip((first, second), unions, strict=True):
            assert units(union) == units(one) and length(union) == len(units(one))
            gaps = [later[0] - earlier[1] for earlier, later in zip(union, union[1:], strict=False)]
            assert all(gap > 0 for gap in gaps), "in order, and those that touch are one"
        shared = common(*unions)
        assert units(shared) == units(first) & units(second) and all(begin < end for begin, end in shared)
        assert shared == common(*reversed(unions))


NO_NUMBERS = (None, True, "1", [1], {}, math.nan, math.inf, -math.inf)
NO_TIMES = (
    None, [], [[]], [[1.0]], [[], []], [[1.0], 2.0], [[1.0], [2.0, 3.0]], [[1.0], ["2"]], [[1.0], [True]],
    [[1.0], [0.0]], [[1.0], [0]], [[1.0], [-0.5]], [[1.0], [-3.0]], [[1.0], [math.nan]], [[1.0], [math.inf]],
    [[1.0], (2.0,)],
)  # fmt: skip


def test_values_of_a_form():
    for form, taken, refused in (
        (checks.OBJECT, ({}, {"a": 1}), (None, [], "{}")),
        (checks.LIST, ([], [1]), (None, {}, (1,), "[]")),
        (checks.TEXT, ("", "a"), (None, 1, ["a"])),
        (checks.TRUTH, (True, False), (None, 0, 1, "true")),
        (checks.NUMBER, (0, -1, 0.5, -2.5), NO_NUMBERS),
        (checks.POSITIVE, (1, 0.001, 0.5), (*NO_NUMBERS, 0, 0.0, -0.5, -1)),
        (checks.COUNT, (1, 2, 10**9), (*NO_NUMBERS, 0, -1, 1.0)),
        (checks.WHOLE, (0, 1, 10**9), (*NO_NUMBERS, -1, 1.0, 0.0)),
        (checks.SAMPLES, ([[1.0], [2.0]], [[1, 2.5], [0.001, 3]], [[0.25]] * 3), NO_TIMES),
    ):
        assert [value for value in taken if not form.fits(value)] == []
        assert [value for value in refused if form.fits(value)] == []
