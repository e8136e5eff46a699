"""Stages by the times of their segments, and where merging pays."""

from itertools import product

import pytest
from auxhead.model.parallel.pipeline import placement
from auxhead.model.parallel.pipeline.cut import cut
from hypothesis import given
from hypothesis import strategies as st
from support import pipeline_ranks


@pytest.mark.parametrize("leave, gathering, merges", [(0.5, 1.0, True), (0.5, 3.0, False), (0.0, 0.1, False)])
def test_merging_where_it_saves_more_than_it_takes(monkeypatch, leave, gathering, merges):
    """The slowest stage takes 4 ms; without merging, stages have the times of all samples."""
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    made, _ = cut(network, x, x.device, "as_is")
    times = iter([2.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(placement, "median_ms", lambda *_: next(times))
    monkeypatch.setattr(placement, "_gathering_ms", lambda *_: gathering)
    stays = 1.0 - leave
    placed = placement.place(made, x, [1.0, stays, stays, stays], 2)
    assert placed.merges == [merges] and placed.extra_steps == [1 * merges]
    assert placed.starts == ([0, 1] if merges else [0, 2])
    assert ("are merged" in placed.notes[0]) == merges


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1.0, 0.75, 0.5, 0.25]), st.sampled_from([None, 0.5, 2.0]))),
)
def test_the_slowest_stage_is_as_fast_as_merging_can_make_it(stages):
    ms, shares, gathering = zip((3, 1.0, 0.5), *stages, strict=True)

    def slowest(merges):
        share, found = shares[0], []
        for stage, time in enumerate(ms):
            does = stage < len(merges) and merges[stage]
            found.append(time * share + (gathering[stage] if does else 0.0))
            share = shares[stage + 1] if does else share
        return max(found)

    choices = [[False] if each is None else [False, True] for each in gathering[:-1]]
    found = placement.merges_of(ms, shares, gathering[:-1])
    assert len(found) == len(stages)
    assert slowest(found) == min(map(slowest, product(*choices)))
    assert slowest([False] * len(stages)) > slowest(found) or not any(found)


def test_rows_that_are_no_samples_are_never_merged(monkeypatch):
    monkeypatch.setattr(placement, "_gathering_ms", lambda *_: 0.0)
    network, x = pipeline_ranks.skipping(), pipeline_ranks.batch_of("skipping", 4)
    placed = placement.place(cut(network, x, x.device, "as_is")[0], x, [1.0, 0.1, 0.1], 3)
    assert placed.merges == [False, False] and "no row a sample" in placed.notes[0]


def test_what_merging_takes_where_rows_are_samples():
    for name, moves in (("plain", [True] * 4), ("skipping", [False, False, True])):
        x = pipeline_ranks.batch_of(name, 4)
        found = placement.merging_ms(cut(getattr(pipeline_ranks, name)(), x, x.device, "as_is")[0].segments, x)
        assert [ms is not None and ms > 0 for ms in found] == moves
