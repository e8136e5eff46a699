"""Predictions of pipelines: beside ticking clocks, closed forms, bounds, and what must not make them slower."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from auxhead.autotune.pipelines.simulate import MOST_MICRO_BATCHES, StageTimes, bound, predicted_images_s, simulate
from auxhead.model.parallel.pipeline import exchange
from auxhead.model.parallel.pipeline.survivors import NOBODY, Merging
from hypothesis import given
from hypothesis import strategies as st

SHARES = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])
STAGES = st.lists(
    st.builds(
        StageTimes,
        stage_ms=st.integers(1, 5),
        link_ms=st.integers(0, 3),
        leave=SHARES,
        merges=st.booleans(),
        gpus=st.integers(1, 3),
    ),
    min_size=1,
    max_size=4,
)
SIZES, BATCHES, REQUESTS = st.integers(1, 6), st.integers(1, 40), st.integers(1, 3)


def samples_of_stages(stages: list[StageTimes], size: int, batch: int) -> list[list[int]]:
    """Samples of each micro-batch on each stage, merged as stages really merge."""
    steps = -(-batch // size) + sum(stage.merges for stage in stages[:-1])
    own = np.arange(steps * size)
    coming = list(np.where(own < batch, own, NOBODY).reshape(steps, size))
    found, last, share = [], -(-batch // size) - 1, 1.0
    for stage in stages:
        found.append([int((places != NOBODY).sum()) for places in coming])
        share *= 1.0 - stage.leave
        if not stage.merges:
            continue
        merging, came, stayed, out = Merging(size, []), 0, 0, []
        for step, of_step in enumerate(coming):
            places = of_step.copy()
            for row in np.flatnonzero(places != NOBODY):
                came += 1
                if int(came * share + 0.5) > stayed:
                    stayed += 1
                else:
                    places[row] = NOBODY
            handed = [] if (places != NOBODY).any() else None
            out.append(merging.hand_on(places, handed, last=step >= last)[0])
        coming, last, share = out, last + merging.extra_steps, 1.0
    return found


def ticking(stages: list[StageTimes], samples: list[list[int]]) -> int:
    """The time at which all is done, by clocks that tick once a ms; all times are whole."""
    steps, last = range(len(samples[0])), len(stages) - 1
    there = {(0, i): 0 for i in steps}
    computed, handed, begun, gone = {}, {}, {}, {}

    def before(times: dict, stage: int, i: int, now: int, turns: int = 1) -> bool:
        """Whether the GPU that has the micro-batch is done with what it had some turns before."""
        earlier = i - turns * stages[stage].gpus
        return earlier < 0 or times.get((stage, earlier), now + 1) <= now

    for now in count():
        changed = True
        while changed:
            changed = False
            for key in [(stage, i) for stage in range(len(stages)) for i in steps]:
                stage, i = key
                if key not in computed and there.get(key, now + 1) <= now and before(handed, *key, now):
                    computed[key] = now + stages[stage].stage_ms * (samples[stage][i] > 0)
                    changed = True
                if key not in handed and computed.get(key, now + 1) <= now and (i == 0 or (stage, i - 1) in handed):
                    handed[key], changed = now, True
                if key not in handed or key in begun or stage == last:
                    continue
                receives = before(handed, stage + 1, i, now, 2)
                receives = receives and (stage + 1 == last or before(gone, stage + 1, i, now, 2))
                if receives and before(gone, *key, now):
                    begun[key], changed = now, True
                    gone[key] = there[stage + 1, i] = now + stages[stage].link_ms
        if len(handed) == len(stages) * len(steps):
            return now


@given(STAGES, SIZES, BATCHES)
def test_it_is_what_ticking_clocks_show(stages, size, batch):
    predicted = simulate(stages, size, batch)
    assert predicted.request_ms == ticking(stages, samples_of_stages(stages, size, batch))
    assert predicted.images_per_s == pytest.approx(batch / predicted.request_ms * 1e3)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 6), (4, 3), (3, 64)])
def test_equal_stages(stages, micro_batches):
    predicted = simulate([StageTimes(2.0)] * stages, 20, 20 * micro_batches)
    assert predicted.request_ms == 2.0 * (micro_batches + stages - 1)
    assert predicted.busy == (micro_batches / (micro_batches + stages - 1),) * stages


def test_links_and_the_slowest_stage():
    """Links are hidden behind stages that take longer."""
    two = [StageTimes(2.0, link_ms=0.5), StageTimes(3.0)]
    assert simulate(two, 1, 10).request_ms == 2.0 + 0.5 + 10 * 3.0
    three = [StageTimes(2.0, link_ms=0.5), StageTimes(2.0, link_ms=0.5), StageTimes(1.0)]
    assert simulate(three, 1, 10).request_ms == 2.0 + 0.5 + 10 * 2.0 + 0.5 + 1.0


def test_one_stage_is_a_plain_sum():
    assert simulate([StageTimes(2.5, link_ms=9.0, leave=0.5)], 8, 33, requests=4).request_ms == 5 * 2.5
    assert simulate([StageTimes(2.5)], 8, 33, requests=4).images_per_s == pytest.approx(33 / 12.5 * 1e3)


def test_merging_fills_micro_batches():
    """Half of 80 samples leave: 4 of 8 micro-batches go on, every second step, behind one that lets none out."""
    stages = [StageTimes(1.0, leave=0.5, merges=True), StageTimes(2.0)]
    assert simulate(stages, 10, 80).request_ms == 2.0 + 4 * 2.0
    as_they_lie = [replace(stages[0], merges=False), stages[1]]
    assert simulate(as_they_lie, 10, 80).request_ms == 1.0 + 8 * 2.0


def test_requests_of_many_micro_batches_go_through_several_schedules():
    """Which each merging stage empties at its end."""
    assert MOST_MICRO_BATCHES == exchange._MOST_MICRO_BATCHES
    stages = [StageTimes(1.0, leave=0.9, merges=True), StageTimes(2.0)]
    few = simulate(stages, 100, 6400)
    many = simulate(stages, 100, 6500)
    assert few.busy[1] * few.request_ms == pytest.approx(7 * 2.0)
    assert many.busy[1] * many.request_ms == pytest.approx(8 * 2.0)


def test_a_schedule_ends_once_all_is_sent():
    stages = [StageTimes(3.0, link_ms=1.0), StageTimes(1.0)]
    assert simulate(stages, 1, 2).request_ms == 8.0
    assert simulate(stages, 1, 2, requests=2).images_per_s == pytest.approx(4 / 15 * 1e3)


@given(STAGES, SIZES, BATCHES, REQUESTS, st.integers(1, 3))
def test_it_never_beats_the_bound(stages, size, batch, requests, replicas):
    predicted = simulate(stages, size, batch, replicas, requests=requests)
    assert predicted.images_per_s <= bound(stages, size, batch, replicas) * (1 + 1e-9)
    assert all(0 <= share <= 1 + 1e-9 for share in predicted.busy)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), SIZES)
def test_it_comes_near_the_bound_without_links_and_with_many_requests(times, size):
    stages = [StageTimes(ms) for ms in times]
    predicted = simulate(stages, size, 30 * size, requests=30)
    # a schedule waits for all it has sent before the next one begins
    assert predicted.images_per_s > 0.8 * bound(stages, size, 30 * size)


@given(STAGES, SIZES, BATCHES, REQUESTS, st.data())
def test_more_gpus_never_hurt(stages, size, batch, requests, data):
    place = data.draw(st.integers(0, len(stages) - 1))
    more = [replace(each, gpus=each.gpus + (index == place)) for index, each in enumerate(stages)]
    before = simulate(stages, size, batch, requests=requests)
    after = simulate(more, size, batch, requests=requests)
    assert after.images_per_s >= before.images_per_s * (1 - 1e-9)
    twice = simulate(stages, size, batch, 2, requests=requests)
    assert twice.images_per_s == pytest.approx(2 * before.images_per_s) and twice.request_ms == before.request_ms


@given(STAGES, SIZES, BATCHES)
def test_exits_never_hurt_where_samples_are_passed_on(stages, size, batch):
    passing = [replace(each, merges=False) for each in stages]
    without = [replace(each, leave=0.0) for each in passing]
    assert simulate(passing, size, batch).request_ms <= simulate(without, size, batch).request_ms


@given(STAGES, SIZES, BATCHES)
def test_merging_never_costs_more_than_its_last_steps(stages, size, batch):
    """What is left at a stage's end is a micro-batch more, at most, on every later stage and link."""
    without = [replace(each, leave=0.0, merges=False) for each in stages]
    merging = sum(each.merges for each in stages[:-1])
    once = sum(each.stage_ms + each.link_ms for each in stages)
    with_exits = simulate(stages, size, batch)
    assert with_exits.request_ms <= simulate(without, size, batch).request_ms + merging * once


def test_what_requests_take_besides():
    stages = [StageTimes(2.0), StageTimes(3.0)]
    plain, besides = (simulate(stages, 10, 40, requests=2, fixed_ms=fixed) for fixed in (0.0, 1.5))
    assert besides.request_ms == plain.request_ms + 1.5
    assert 80e3 / besides.images_per_s == pytest.approx(80e3 / plain.images_per_s + 3.0)


def total_ms(stages: list[StageTimes], batch: int) -> float:
    return batch / simulate(stages, 10, batch).images_per_s * 1e3


def test_hosts_that_take_longer_than_their_gpus():
    stage = StageTimes(1.0, launch_ms=0.5, hand_on_ms=1.0)
    assert total_ms([stage], 100) == pytest.approx(9 * 1.5 + 0.5 + 1.0)
    assert total_ms([replace(stage, hand_on_ms=0.25)], 100) == pytest.approx(0.5 + 10 * 1.0)


def test_hosts_of_stages_that_merge():
    """The next micro-batch is launched before the host waits for one; a later stage launches once it is told."""
    first, second = StageTimes(1.0, merges=True, launch_ms=0.25, hand_on_ms=0.5), StageTimes(1.0)
    assert total_ms([first, second], 100) == pytest.approx(0.25 + 10 * 1.0 + 0.5 + 1.0)
    busy = replace(first, hand_on_ms=1.0)
    assert total_ms([busy, second], 100) == pytest.approx(0.25 + 1.0 + 1.0 + 8 * 1.25 + 1.0 + 1.0)
    told = replace(second, launch_ms=0.5)
    assert total_ms([first, told], 10) == pytest.approx(0.25 + 1.0 + 0.5 + 0.5 + 1.0)
    assert total_ms([replace(first, merges=False), told], 10) == pytest.approx(0.25 + 1.0 + 1.0)


@given(STAGES, SIZES, BATCHES, st.integers(0, 3), st.integers(0, 3))
def test_hosts_never_make_it_faster(stages, size, batch, launch, hand_on):
    slower = [replace(each, launch_ms=launch, hand_on_ms=hand_on) for each in stages]
    assert simulate(slower, size, batch).images_per_s <= simulate(stages, size, batch).images_per_s * (1 + 1e-9)


def test_predicted_from_records():
    """Of a record's shares of all samples, those of the samples that come to a stage; a request of one is as it was."""
    pieces = {
        "graph_ms": [1.0, 2.0, 1.0], "launch_ms": [0.5, 0.25, 0.25], "hand_on_ms": [0.25, 1.0, 0.5],
        "link_ms": [0.0, 0.1], "leave": [0.5, 0.25, 0.25], "merges": [True, False], "request_ms": 8.0,
    }  # fmt: skip
    stages = [
        StageTimes(1.0, 0.0, 0.5, True, launch_ms=0.5, hand_on_ms=0.25),
        StageTimes(2.0, 0.1, 0.5, False, launch_ms=0.25, hand_on_ms=1.0),
        StageTimes(1.0, launch_ms=0.25, hand_on_ms=0.5),
    ]
    one = 0.5 + 1.0 + 0.25 + 0.25 + 2.0 + 0.1 + 1.0  # the last stage's host is told, and launches, meanwhile
    wanted = simulate(stages, 10, 80, fixed_ms=8.0 - one).images_per_s
    assert predicted_images_s(80, 10, pieces) == pytest.approx(wanted)
    assert predicted_images_s(10, 10, {**pieces, "leave": [0.0, 0.0, 1.0]}) == pytest.approx(10e3 / 8.0)
    everybody = [replace(stages[0], leave=1.0), replace(stages[1], leave=0.0), stages[2]]
    found = predicted_images_s(80, 10, {**pieces, "leave": [1.0, 0.0, 0.0], "request_ms": 1.0})
    assert found == pytest.approx(simulate(everybody, 10, 80).images_per_s)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StageTimes(0.0), "stage_ms, link_ms, launch_ms, hand_on_ms: got 0.0, 0.0, 0.0, 0.0, wants"),
        (lambda: StageTimes(1.0, hand_on_ms=-1.0), "hand_on_ms: got 1.0, 0.0, 0.0, -1.0, wants"),
        (lambda: StageTimes(1.0, leave=1.5), "leave: got 1.5, wants a share from 0 to 1"),
        (lambda: StageTimes(1.0, gpus=0), "gpus: got 0, wants 1 or more"),
        (lambda: simulate([], 1, 1), "stages: got none"),
        (lambda: simulate([StageTimes(1.0)], 0, 1), "split_size: got 0"),
        (lambda: simulate([StageTimes(1.0)], 1, 1, 0), "replicas: got 0"),
        (lambda: bound([StageTimes(1.0)], 1, 0), "batch: got 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
