"""Layouts on several GPUs: what the search finds, beside all that there are, and by the rules of the engine."""

from itertools import combinations, product

import pytest
from auxhead.autotune.pipelines.simulate import StageTimes, simulate
from auxhead.autotune.plan.layouts import HostTimes, SegmentTimes, best_layouts
from auxhead.model.parallel.pipeline import placement
from hypothesis import given
from hypothesis import strategies as st


def segment_times(ms, split_size=10, link=0.0, gathering=0.0, turn=0.0, handing=0.0):
    cuts = len(ms) - 1
    return SegmentTimes(split_size, ms, turn, [handing] * cuts, [gathering] * cuts, [link] * cuts)


def never(segments):
    return [0.0] * (segments - 1) + [1.0]


def test_without_exits_each_gpu_has_the_whole_network():
    best, *others = best_layouts([segment_times([1.0, 1.0])], never(2), 40, 2)
    assert (best.starts, best.replicas, best.runs_today, best.gpus) == ((0,), 2, True, 2)
    assert best.prediction.images_per_s == pytest.approx(2 * 40 / 8 * 1e3) and best.busy == 1.0
    (two,) = [one for one in others if one.starts == (0, 1)]
    assert two.prediction.request_ms == 5.0 and two.busy == 0.8 and two.bound == 10_000.0


def test_where_most_leave_early_the_first_stage_gets_more_gpus():
    """Of 40 micro-batches 8 go on, so that a GPU a stage would leave the second one idle for the most part."""
    layouts = best_layouts([segment_times([4.0, 4.0])], [0.8, 0.2], 400, 5)
    best = layouts[0]
    assert [stage.gpus for stage in best.stages] == [4, 1] and best.stages[0].merges and not best.runs_today
    assert best.prediction.images_per_s > 5 * 400 / 320 * 1e3 * 1.4  # the whole network on each
    today = next(one for one in layouts if one.runs_today)
    assert today.prediction.images_per_s < best.prediction.images_per_s


def test_stages_pay_for_turns_links_handing_and_gathering():
    times = SegmentTimes(10, [1.0, 2.0, 4.0], 0.5, [0.1, 0.2], [0.3, None], [0.7, 0.8])
    layouts = best_layouts([times], [0.5, 0.25, 0.25], 40, 3)
    (three,) = [one for one in layouts if len(one.stages) == 3]
    assert [stage.stage_ms for stage in three.stages] == pytest.approx([1.5 + 0.1 + 0.3, 2.5 + 0.1 + 0.2, 4.5 + 0.2])
    assert [stage.link_ms for stage in three.stages[:-1]] == [0.7, 0.8]
    assert [stage.leave for stage in three.stages[:-1]] == [0.5, 0.5]
    assert [stage.merges for stage in three.stages] == [True, False, False]
    (whole,) = [one for one in layouts if one.replicas == 3]
    assert whole.stages == (StageTimes(7.5),)


def test_hosts_of_several_stages_take_time_and_that_of_one_does_not():
    hosts = HostTimes(hand_on_ms=1.25, request_ms=2.0)
    layouts = best_layouts([segment_times([1.0, 1.0])], never(2), 10, 2, hosts)
    (two,) = [one for one in layouts if len(one.stages) == 2]
    assert two.prediction.request_ms == 1.25 + 1.0 + 2.0
    whole = next(one for one in layouts if len(one.stages) == 1)
    assert whole.prediction.request_ms == 2.0


def test_the_split_size_is_chosen():
    """Small micro-batches start the second stage sooner, and cost more."""
    sizes = [segment_times([ms, ms], size) for size, ms in ((5, 1.0), (20, 2.2), (80, 8.0))]
    (two,) = [one for one in best_layouts(sizes, never(2), 80, 2) if len(one.stages) == 2]
    assert (two.split_size, two.prediction.request_ms) == (20, pytest.approx(5 * 2.2))


@pytest.mark.parametrize("leave, gathering", [(0.5, 1.0), (0.5, 3.0), (0.0, 0.1), (0.3, 0.9)])
def test_samples_are_merged_where_the_engine_merges_them(leave, gathering):
    times = segment_times([2.0, 1.0, 3.0], gathering=gathering)
    shares = [leave, 0.0, 1.0 - leave]
    open_shares = [1.0, 1.0 - leave, 1.0 - leave]
    layouts = [one for one in best_layouts([times], shares, 40, 3) if all(stage.gpus == 1 for stage in one.stages)]
    assert len(layouts) > 1
    for one in layouts:
        engine = placement._described(
            one.starts, times.segment_ms, [gathering, gathering, 0.0], [True] * 3, open_shares, 10
        )
        assert [stage.merges for stage in one.stages[:-1]] == engine.merges


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=5, max_size=5),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.4]),
)
def test_it_is_about_as_good_as_the_best_there_is(ms, left, gpus, link):
    times = segment_times([float(each) for each in ms], 4, link, 0.1, 0.2)
    weights = [*left[: len(ms) - 1], 3]
    shares = [weight / sum(weights) for weight in weights]
    (best, *_) = best_layouts([times], shares, 48, gpus)
    assert best.prediction.images_per_s >= 0.98 * most_of_all(times, shares, 48, gpus)
    assert best.gpus <= gpus


def most_of_all(times, shares, batch, gpus):
    """The most images a second of all cuts, numbers of GPUs and replicas."""
    segments = len(shares)
    open_shares = [1.0 - sum(shares[:index]) for index in range(segments)]
    found = []
    for count in range(1, min(segments, gpus) + 1):
        for cuts in combinations(range(1, segments), count - 1):
            starts, ends = [0, *cuts], [*cuts, segments]
            ms = [times.turn_ms + sum(times.segment_ms[a:b]) for a, b in zip(starts, ends, strict=True)]
            for own in product(range(1, gpus + 1), repeat=count):
                if sum(own) > gpus:
                    continue
                merging = placement.merges_of(
                    [each / gpus_ for each, gpus_ in zip(ms, own, strict=True)],
                    [open_shares[start] for start in starts],
                    [0.1 / gpus_ for gpus_ in own[:-1]],
                )
                stages = []
                for index, (a, b) in enumerate(zip(starts, ends, strict=True)):
                    leave = 1.0 - open_shares[b] / open_shares[a] if b < segments else 0.0
                    merges = b < segments and merging[index]
                    link = times.link_ms[0] if b < segments else 0.0
                    stages.append(StageTimes(ms[index] + 0.1 * merges, link, max(leave, 0.0), merges, own[index]))
                found.append(simulate(stages, times.split_size, batch, gpus // sum(own)).images_per_s)
    return max(found)


def test_many_gpus_and_taps_are_searched_in_seconds():
    times = [segment_times([1.0 + index % 3 for index in range(17)], size, 0.1, 0.1, 0.1) for size in (8, 32)]
    shares = [0.05] * 16 + [0.2]
    few, many = (best_layouts(times, shares, 512, gpus)[0] for gpus in (16, 64))
    assert many.gpus <= 64 and many.prediction.images_per_s >= 4 * few.prediction.images_per_s * 0.999
