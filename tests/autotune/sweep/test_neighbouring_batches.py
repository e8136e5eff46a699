"""Winners of one batch size, measured at the next ones."""

import pytest
from auxhead.autotune.records.record import read_records
from auxhead.autotune.sweep.config_text import text
from auxhead.autotune.sweep.exclusion import excluded
from auxhead.autotune.sweep.measure import Sweep, measure_winners_at_neighbours
from auxhead.autotune.sweep.search import STRATEGIES, Ask
from auxhead.autotune.sweep.space import neighbours
from support import sweep_fakes
from support.sweep_fakes import Synthetic, records_at, small_target

TARGETS = [small_target(samples) for samples in (4, 8, 12)]
#: By the rule of none of them, and excluded at none.
BEST, GOOD, FAIR = [
    config
    for config in neighbours(TARGETS[0].rule, TARGETS[0].shape)
    if not any(config == one.rule or excluded(config, one.shape) for one in TARGETS)
][:3]
#: Microseconds, whatever the head; those of the rules are 5.
US = {BEST: 1.0, GOOD: 2.0, FAIR: 3.0}


@pytest.fixture
def fixed(monkeypatch):
    monkeypatch.setattr(sweep_fakes, "true_us", lambda target, config: US.get(config, 5.0))


def swept(asks, kept, measurer=None, targets=TARGETS):
    """Sweep heads, asking for some configurations of each, and exchange winners; return the sweep."""

    def search(target):
        yield Ask((target.rule, *asks[target.shape.samples]), 4, 1.0)

    sweep = Sweep(measurer or Synthetic(noise=0.0), search, kept)
    sweep.run(targets)
    measure_winners_at_neighbours(sweep.tunings)
    return sweep


def winners(sweep):
    return [found.config for found in sweep_fakes.winners(sweep)]


def test_a_winner_goes_from_size_to_size_while_it_wins(fixed, tmp_path):
    out = tmp_path / "records.jsonl"
    asks = {4: [BEST], 8: [GOOD], 12: [FAIR]}
    sweep = swept(asks, records_at(out))
    assert winners(sweep) == [BEST] * 3, "at 12 it is measured since it wins at 8"
    records = read_records(out)
    kept = out.read_bytes()
    again = swept(asks, records_at(out))
    assert winners(again) == winners(sweep) and out.read_bytes() == kept and not again.measurer.timed
    assert {record.protocol["rounds"] for record in records} == {4}, "as often as what they are compared with"


def test_a_winner_is_measured_at_the_next_sizes_only(fixed, tmp_path):
    out = tmp_path / "records.jsonl"
    swept({4: [BEST], 8: [BEST, GOOD], 12: [FAIR], 15: []}, records_at(out), targets=[*TARGETS, small_target(15)])
    measured = {(one.cell["samples"], one.variant) for one in read_records(out)}
    assert {samples for samples, variant in measured if variant == text(BEST)} == {4, 8, 12, 15}
    assert {samples for samples, variant in measured if variant == text(GOOD)} == {8}, "it wins nowhere"
    assert {samples for samples, variant in measured if variant == text(FAIR)} == {8, 12}, "next to where it won"


def test_what_is_excluded_or_fails_is_no_harm(fixed):
    def fails(config):
        return ("prepare", "wrong answer", "") if config == BEST else None

    class FailsAtEight(Synthetic):
        def prepare(self, target, configs):
            failed = super().prepare(target, configs)
            return failed if target.shape.samples == 8 else {}

    sweep = swept({4: [BEST], 8: [GOOD], 12: []}, records_at(None), FailsAtEight(noise=0.0, fails=fails))
    assert winners(sweep) == [BEST, GOOD, GOOD]
    assert sweep.failures == {"wrong answer": 1}, "counted once"


def test_after_a_real_strategy_nothing_is_measured_twice(tmp_path):
    out = tmp_path / "records.jsonl"
    sweep = Sweep(Synthetic(), STRATEGIES["quick"], records_at(out))
    sweep.run(TARGETS[:2])
    measure_winners_at_neighbours(sweep.tunings)
    measured = [(one.key, one.protocol["captures"]) for one in read_records(out)]
    assert len(measured) == len(set(measured))


def test_heads_that_differ_in_more_are_none_of_its_business(fixed):
    others = [small_target(8, classes=11), small_target(8, taps=("layer2",)), small_target(8, model="own:net")]
    sweep = swept({4: [BEST], 8: [GOOD]}, records_at(None), targets=[TARGETS[0], *others])
    assert winners(sweep) == [BEST, *[GOOD] * 3]
