"""How a search climbs from what it has measured to what lies beside it."""

from dataclasses import replace

from auxhead.autotune.comparison import Paired
from auxhead.autotune.search import climb
from auxhead.autotune.space import grid, neighbours
from sweep_fakes import small_target

TARGET = small_target(samples=16, channels=256, columns=196, classes=1000)
SPLIT, *OTHER_SPLITS = (one for one in grid(TARGET.shape) if not one.tiled)
TILE = next(one for one in grid(TARGET.shape) if one.tiled and one.block_n == 1)
GROUP = next(one for one in grid(TARGET.shape) if one.block_n > 1)
#: A split one with no neighbour in common with the first.
FAR_SPLIT = next(
    one for one in OTHER_SPLITS if not set(neighbours(one, TARGET.shape)) & set(neighbours(SPLIT, TARGET.shape))
)


def asked_first(times, leaders=3, at_once=1000):
    known = {one: Paired([[us]], [[100.0]], "run") for one, us in times.items()}
    climbing = climb(TARGET, known, known, leaders=leaders, at_once=at_once, steps=1, rounds=4, shares=(0.0, 1.0))
    return next(climbing).configs


def test_every_way_to_multiply_is_climbed_that_is_near():
    new = asked_first({SPLIT: 100.0, FAR_SPLIT: 101.0, TILE: 115.0, GROUP: 119.0})
    for one in (SPLIT, TILE, GROUP):
        assert set(new) >= {beside for beside in neighbours(one, TARGET.shape) if beside not in (SPLIT, TILE, GROUP)}
    assert not set(new) & set(neighbours(FAR_SPLIT, TARGET.shape)) - set(neighbours(TILE, TARGET.shape))


def test_what_is_far_off_is_left_to_the_fastest():
    new = asked_first({SPLIT: 100.0, FAR_SPLIT: 101.0, TILE: 130.0, GROUP: 119.0})
    assert set(new) >= set(neighbours(FAR_SPLIT, TARGET.shape)) - {SPLIT, TILE, GROUP}
    assert not set(new) & (set(neighbours(TILE, TARGET.shape)) - set(neighbours(GROUP, TARGET.shape)))


def test_leaders_get_the_same_share():
    new = asked_first({SPLIT: 100.0, TILE: 101.0, GROUP: 102.0}, at_once=6)
    expected = [neighbours(one, TARGET.shape) for one in (SPLIT, TILE, GROUP)]
    shares = [[one for one in new if one in around] for around in expected]
    assert len(new) == 6 and all(len(share) >= 2 for share in shares)


def test_what_differs_in_caps_alone_is_one_leader():
    capped = replace(SPLIT, max_registers=128)
    new = asked_first({capped: 99.0, SPLIT: 100.0, FAR_SPLIT: 101.0}, leaders=2)
    assert set(new) >= set(neighbours(FAR_SPLIT, TARGET.shape)) - {SPLIT}
