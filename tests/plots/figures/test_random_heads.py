"""The figure of random heads: which runs it takes, what it says, and what it refuses."""

import dataclasses

import pytest
from auxhead.plots.figures.random_heads import random_heads_figure, random_heads_numbers
from auxhead.plots.records import NoRecords
from support.head_fakes import a_random_head


def records(*heads):
    return [
        dataclasses.replace(one, protocol={**one.protocol, "rounds": 10, "captures": 3})
        for head in heads
        for one in head
    ]


def some():
    return records(
        a_random_head(0, "old", ratio=9.0),
        a_random_head(0, ratio=3.0, compiled=1.5),
        a_random_head(1, ratio=2.0),
        a_random_head(2, ratio=0.5, kind="flattened", pool="none"),
        a_random_head(3, kind="flattened", error="wrong answer: off"),
    )


def test_numbers_are_those_of_the_last_run_of_each_head():
    drawn = random_heads_numbers(some())
    assert list(drawn["kinds"]) == ["pooled", "flattened"]
    assert [(one["number"], one["ratio"], one["to_compiled"]) for one in drawn["kinds"]["pooled"]] == [
        (1, 2.0, None), (0, 3.0, 1.5),
    ]  # fmt: skip
    (slow,) = drawn["kinds"]["flattened"]
    assert (slow["low"], slow["high"]) == pytest.approx((0.475, 0.525))
    assert slow["head"] == "8x64x7x7 float16; not pooled, 10 classes"
    assert drawn["title"] == (
        "Fused heads are at least as fast as plain PyTorch in 66.7 % of 3,\nand as torch.compile in 100.0 % of 1"
    )
    assert drawn["stamp"].startswith("3 heads of seed 0, alone; ") and "10 rounds in 3 fresh" in drawn["stamp"]


def test_kinds_lie_side_by_side_around_the_line():
    figure = random_heads_figure(random_heads_numbers(some()))
    (axes,) = figure.axes
    line, pooled, flattened, compiled = axes.lines
    assert list(line.get_ydata()) == [1.0, 1.0] and list(pooled.get_ydata()) == [2.0, 3.0]
    assert max(pooled.get_xdata()) < min(flattened.get_xdata()) and pooled.get_color() != flattened.get_color()
    assert list(compiled.get_ydata()) == [1.5] and compiled.get_xdata()[0] == pooled.get_xdata()[1]
    assert [one.get_text() for one in axes.get_xticklabels()] == ["pooled\n2 of 2", "flattened\n0 of 1"]
    assert axes.get_legend() is not None
    without = random_heads_figure(random_heads_numbers(records(a_random_head(1, ratio=2.0))))
    assert without.axes[0].get_legend() is None


def test_heads_that_were_not_timed_are_no_figure():
    with pytest.raises(NoRecords, match="no random head that was timed beside plain PyTorch"):
        random_heads_numbers(records(a_random_head(0, error="wrong answer: off")))
