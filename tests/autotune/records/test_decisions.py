"""Decisions: the fastest wins, unless something simpler is tied with it; what was timed most often decides."""

import math

import pytest
from auxhead.autotune.records.comparison import Paired, compare
from auxhead.autotune.records.decisions import (
    Decision,
    by_shape,
    deciding,
    joint_confidence,
    measurement,
    simplicity,
    winner,
)
from auxhead.autotune.records.record import Record
from auxhead.autotune.sweep.space import spread_out
from auxhead.kernels.launch.head_shape import HeadShape
from support.noisy_timings import constant

EXACT = {"simple": 100.0, "middle": 99.7, "fast": 90.0, "as fast": 89.9}


def test_the_fastest_wins_unless_a_simpler_one_is_tied():
    samples = {name: constant(us) for name, us in EXACT.items()}
    assert winner(samples, ["simple", "middle", "fast", "as fast"]) == "fast"
    assert winner(samples, ["simple", "middle", "as fast", "fast"]) == "as fast"
    del samples["fast"], samples["as fast"]
    assert winner(samples, ["simple", "middle"]) == "simple"
    assert winner(samples, ["middle", "simple"]) == "middle"
    by_baseline = {"simple": constant(100.0), "slower": constant(105.0, "second", 110.0)}
    assert winner(by_baseline, ["simple", "slower"]) == "slower", "of another run, whose baseline was slower, too"


def test_what_is_tied_with_both_is_no_answer():
    """Captures 1 % apart: 1.5 % are a tie and 3 % are none."""
    steps = [-0.01, -0.005, 0.0, 0.005, 0.01]
    times = {name: [[us * math.exp(step)] * 4 for step in steps] for name, us in (("a", 103), ("b", 101.5), ("c", 100))}
    samples = {name: Paired(own, times["a"], "run") for name, own in times.items()}
    tied = [compare(times[one], times[other]).is_tie for one, other in ("ab", "bc", "ac")]
    assert tied == [True, True, False]
    assert winner(samples, ["a", "b", "c"]) == "c" and winner(samples, ["b", "a", "c"]) == "b"


def test_bad_variants():
    with pytest.raises(ValueError, match="simpler_first: got 1 variants"):
        winner({"a": constant(1.0), "b": constant(1.0)}, ["a"])


#: A configuration's fields, all as small as can be.
SMALL = dict.fromkeys(
    ("block_n", "block_c", "block_p", "block_a", "block_f", "block_k", "block_s", "block_j", "window_parts"), 1
)
SMALL |= {"stages": 1, "num_warps": 4, "waits": False, "max_registers": 0, "max_programs": 0, "weight_buffers": 0}
FIELDS = {"rule": SMALL, "narrow": {**SMALL, "num_warps": 8}, "capped": {**SMALL, "max_registers": 64}}


class Named(str):
    """A configuration of ``FIELDS``, which are its attributes, by its name."""

    def __init__(self, name):
        vars(self).update(FIELDS[name])


def decision(**us):
    return Decision({Named(name): constant(one) for name, one in us.items()}, Named("rule"))


def test_ties_go_to_the_rule_and_then_to_the_simplest():
    assert decision(capped=90.0, narrow=90.1, rule=90.2).winner == "rule"
    tied = decision(capped=90.0, narrow=90.1, rule=100.0)
    assert tied.winner == "narrow" and not tied.winner_is_fastest
    fastest = decision(capped=80.0, narrow=90.0, rule=100.0)
    assert fastest.winner == "capped" and fastest.winner_is_fastest
    nothing = decision()
    assert nothing.winner is None and not nothing.winner_is_fastest


def test_the_order_of_simplicity_is_total():
    shape = HeadShape(32, 64, 1, 3136, 1, 1, "channels_last", "avg", 1000, "float16")
    found = [vars(config) for config in spread_out(shape, 50)]
    ordered = sorted(found, key=simplicity)
    assert len({simplicity(config) for config in found}) == 50
    assert sorted(reversed(found), key=simplicity) == ordered
    tiled = [config["block_f"] > 1 for config in ordered]
    assert tiled == sorted(tiled)


def test_what_is_simpler():
    large = {**SMALL, "block_a": 64}
    changes = {"max_registers": 64}, {"max_programs": 64}, {"window_parts": 2, "block_a": 32}, {"num_warps": 8}
    for changed in (*changes, {"stages": 2}, {"block_a": 32}):
        assert simplicity(large) < simplicity({**large, **changed})
    for field in ("max_registers", "max_programs"):
        assert simplicity({**SMALL, field: 1, "num_warps": 4}) > simplicity({**SMALL, "num_warps": 32}), "any cap"
    assert simplicity({**SMALL, "block_f": 2}) > simplicity({**SMALL, "waits": True}), "tiled"


@pytest.mark.parametrize(("count", "confidence"), [(1, 0.995), (2, 0.995), (3, 0.9975), (6, 0.999), (51, 0.9999)])
def test_the_more_variants_the_surer_each_interval(count, confidence):
    """Bonferroni's: the chances of error, 0.5 % of two, are shared among those that are compared with one."""
    assert joint_confidence(count) == pytest.approx(confidence)


def swept(variant="a", rule="rule", *, rounds=4, **changed):
    """A sweep's record of a configuration beside the rule's; ``changed`` are fields of its cell."""
    shape = HeadShape(8, 64, 1, 49, 1, 1, "channels_last", "avg", 10, "float16")
    protocol = {"place": "alone", "kernel": "k", "config": {"name": variant}}
    pairs = [
        {"role": "other", "variant": "x", "samples": [[1.0]]},
        {"role": "rule", "variant": rule, "samples": [[100.0] * rounds] * 2},
    ]
    return Record(
        kind="sweep", cell={**shape._asdict(), **changed}, exits="never", run="r",
        variant=variant, utc="", environment={}, protocol=protocol, paired=pairs,
        device_us={"median": 90.0, "samples": [[90.0] * rounds] * 2},
    )  # fmt: skip


def test_a_measurement_is_read_with_the_baseline_of_its_rule():
    found = measurement(swept("a", "default", rounds=3))
    assert (found.variant, found.rule, found.config) == ("a", "default", {"name": "a"})
    assert found.paired == Paired([[90.0] * 3] * 2, [[100.0] * 3] * 2, "r")
    assert found.median_us == 90.0 and found.rounds == 6


def test_records_are_grouped_by_shape():
    turned = swept("turned")
    turned = Record(**{**vars(turned), "cell": dict(reversed(turned.cell.items()))})
    found = by_shape([swept("first"), swept("batch", samples=16), turned, swept("classes", classes=9), swept("last")])
    assert [[one.variant for one in its] for its in found.values()] == [
        ["first", "turned", "last"], ["batch"], ["classes"],
    ]  # fmt: skip
    assert next(iter(found)) == tuple(swept().cell.values())


def variants(*records):
    return [one.variant for one in deciding(map(measurement, records))]


def test_measurements_that_decide():
    """Timed most often, beside the last one's rule."""
    assert variants() == []
    assert variants(swept("a"), swept("b")) == ["a", "b"]
    assert variants(swept("a", rounds=9), swept("b"), swept("c", rounds=9), swept("d", rounds=2)) == ["a", "c"]
    assert variants(swept("a", "old", rounds=9), swept("b"), swept("c", "old"), swept("d")) == ["b", "d"]
    assert variants(swept("a", "old"), swept("b", "old"), swept("c"), swept("d")) == ["c", "d"]


def test_what_was_timed_is_compared():
    found = decision(narrow=90.0, rule=100.0)
    assert found.compare("narrow", "rule").median_ratio == pytest.approx(0.9)
    assert tuple(found.compare("rule", "rule")) == (1.0, 1.0, 1.0)
    assert found.compare("capped", "rule") is None and found.compare(None, "rule") is None
