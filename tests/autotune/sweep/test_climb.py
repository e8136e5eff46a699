"""How a search climbs from what it has measured to what lies beside it."""

from dataclasses import replace

import pytest
from auxhead.autotune.records.comparison import Paired
from auxhead.autotune.sweep.search import climb
from auxhead.autotune.sweep.space import neighbours, spread_out
from support.sweep_fakes import small_target

TARGET = small_target(samples=8, channels=256, columns=196, classes=1000)
#: Tiles of one sample, and of 16.
FIRST, SECOND = (replace(spread_out(TARGET.shape, 4)[place], stages=1) for place in (3, 1))


def timed(us):
    return Paired([[us]], [[100.0]], "run")


def climbing(times, leaders=2, at_once=1000, steps=1):
    known = {one: timed(us) for one, us in times.items()}
    return climb(TARGET, known, known, leaders=leaders, at_once=at_once, steps=steps, rounds=4, shares=(0.0, 1.0))


def uncapped(configs):
    return [one for one in configs if not one.max_registers and not one.max_programs]


def test_neighbours_of_the_fastest_are_tried_the_fastest_ones_first_and_caps_last():
    second = next(one for one in neighbours(FIRST, TARGET.shape) if one.block_a != FIRST.block_a)
    asked = next(climbing({FIRST: 100.0, second: 101.0})).configs
    of_first, of_second = (neighbours(one, TARGET.shape) for one in (FIRST, second))
    assert set(asked) == {*of_first, *of_second} - {FIRST, second}
    wanted = [one for one in (*uncapped(of_first), *uncapped(of_second)) if one not in (FIRST, second)]
    assert list(asked[: len(set(wanted))]) == list(dict.fromkeys(wanted))


def test_ways_to_multiply_take_turns_that_are_near():
    of_first, of_second = (neighbours(one, TARGET.shape) for one in (FIRST, SECOND))
    asked = next(climbing({FIRST: 100.0, SECOND: 109.0}, at_once=8)).configs
    assert list(asked[0::2]) == of_first[:4] and list(asked[1::2]) == of_second[:4]
    assert set(next(climbing({FIRST: 100.0, SECOND: 111.0})).configs) == set(of_first)


def test_nothing_is_asked_for_twice():
    steps = climbing({FIRST: 100.0, SECOND: 101.0}, leaders=12, at_once=7, steps=5)
    asks = [next(steps)]
    for _ in range(4):
        asks.append(steps.send({one: timed(100.0 - len(asks)) for one in asks[-1].configs}))
    asked = [one for ask in asks for one in ask.configs]
    assert len(set(asked)) == len(asked) == 35 and FIRST not in asked and SECOND not in asked
    assert [ask.share for ask in asks] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    last = {one: timed(90.0) for one in asks[-1].configs}
    with pytest.raises(StopIteration) as end:  # though neighbours are left
        steps.send(last)
    assert set(end.value.value) == {FIRST, SECOND, *asked}


def test_it_ends_when_two_steps_in_a_row_find_nothing_that_is_faster_by_a_hundredth():
    steps = climbing({FIRST: 100.0, SECOND: 101.0}, leaders=12, at_once=7, steps=7)
    ask = next(steps)
    for fastest in (98.0, 97.9, 96.5, 96.4):
        ask = steps.send({one: timed(fastest) for one in ask.configs})
    with pytest.raises(StopIteration):
        steps.send({one: timed(96.3) for one in ask.configs})


def test_what_helped_elsewhere_is_tried_first_and_what_did_not_last():
    """Larger tiles are the fastest of all, fewer warps faster than the rest: with larger tiles they come next."""
    tile, warps, channels = ({"block_k": 2 * FIRST.block_k}, {"num_warps": 4}, {"block_c": 32})
    steps = climbing({FIRST: 100.0}, leaders=1, steps=2)
    asked = next(steps).configs
    times = {replace(FIRST, **tile): 60.0, replace(FIRST, **warps): 80.0}
    assert times.keys() | {replace(FIRST, **channels)} <= set(asked)
    then = steps.send({one: timed(times.get(one, 110.0)) for one in asked}).configs
    assert then[0] == replace(FIRST, **tile, **warps)
    assert set(then) == set(neighbours(replace(FIRST, **tile), TARGET.shape)) - {*asked, FIRST}
    untried = replace(FIRST, block_k=4 * FIRST.block_k)
    assert then.index(untried) < then.index(replace(FIRST, **tile, **channels))
