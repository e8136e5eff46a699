"""launch_config.py: a LaunchConfig is frozen and hashable; registers of its threads; counts of its programs."""

import dataclasses

import pytest
from auxhead.kernels import LaunchConfig
from auxhead.kernels.launch.head_view import HeadView
from auxhead.kernels.launch.launch_config import most_registers, next_power_of_2


@pytest.mark.parametrize("n, power", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(n, power):
    assert next_power_of_2(n) == power


def test_a_configuration_is_frozen_and_hashable():
    config, same = (LaunchConfig(1, 16, 1, 64, 1, 16, 1, 16, 1, stages=1, num_warps=4) for _ in range(2))
    assert hash(config) == hash(same)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_n = 2


@pytest.mark.parametrize("num_warps, registers", [(1, 255), (4, 255), (8, 255), (16, 128), (32, 64)])
def test_all_threads_of_a_program_share_the_registers_of_a_multiprocessor(num_warps, registers):
    """The CUDA manual's: 65,536 of 32 bits, and 255 of a thread at most."""
    assert most_registers(num_warps) == registers
    assert LaunchConfig(1, 16, 1, 64, 1, 16, 1, 16, 1, stages=1, num_warps=num_warps).register_limit == registers
    capped = LaunchConfig(1, 16, 1, 64, 1, 16, 1, 16, 1, stages=1, num_warps=num_warps, max_registers=40)
    assert capped.register_limit == 40


def view_of(samples, channels=70, grid=(3, 1)):
    return HeadView((samples, channels, 6, 9), (channels * 54, 54, 9, 1), *grid)


SPLIT = LaunchConfig(1, 16, 2, 8, 1, 32, 8, 64, 2, stages=1, num_warps=4)
TILED = LaunchConfig(16, 16, 2, 8, 32, 16, 4, 64, 2, stages=1, num_warps=4)


@pytest.mark.parametrize("waits", [False, True])
def test_programs_of_a_sample_leave_partial_logits(waits):
    """By hand: 70 channels in blocks of 16 are 5, 3 positions in pairs 2, halves of windows 2; 33 classes fill 48."""
    found = dataclasses.replace(SPLIT, waits=waits).programs(view_of(5), 33)
    sums = 20 * 5 * 48
    # what is waited for is zeroed, else a counter of each sample
    assert found == (20, 20 * 5, 0, 0, sums, 0, sums if waits else 5)
    assert (found.splits, found.pools, found.tiles, found.decisions) == (20, 100, 0, 0)
    assert (found.partial_sums, found.features, found.zeroed, found.total) == (sums, 0, sums if waits else 5, 100)


def test_tiles_multiply_what_other_programs_have_pooled():
    """By hand: 17 samples in groups of 16 are 2, 33 classes in tiles of 16 are 3, each of which 4 programs share."""
    found = TILED.programs(view_of(17), 33)
    features, sums = 2 * 17 * 70 * 3, 4 * 17 * 48
    assert found == (20, 20 * 17, 2 * 3 * 4, 17, sums, features, sums + features)
    assert found.total == 340 + 24 + 17
    exact = TILED.programs(view_of(32, channels=64, grid=(1, 2)), 48)
    assert exact == (8, 8 * 32, 2 * 3 * 4, 32, 4 * 32 * 48, 2 * 32 * 64 * 2, 4 * 32 * 48 + 2 * 32 * 64 * 2)


def test_who_multiplies_and_who_waits():
    assert TILED.tiled and not SPLIT.tiled and not dataclasses.replace(SPLIT, block_f=1).tiled
    assert dataclasses.replace(SPLIT, block_f=2).tiled
    assert TILED.hands_over and not SPLIT.hands_over and dataclasses.replace(SPLIT, waits=True).hands_over


def test_one_program_alone_takes_all_features_and_classes():
    one = LaunchConfig(1, 128, 4, 8, 1, 64, 1, 64, 1, stages=1, num_warps=4)
    assert one.splits(view_of(5)) == 1 and one.multiplies_alone(view_of(5), 64) and one.multiplies_alone(view_of(1), 9)
    assert not one.multiplies_alone(view_of(5), 65)
    changes = ({"block_k": 128}, {"block_j": 128}, {"block_c": 64}, {"window_parts": 2}, {"block_f": 16})
    for changed in changes:
        assert not dataclasses.replace(one, **changed).multiplies_alone(view_of(5), 64), changed


def test_nothing_is_capped_unless_it_is_said():
    assert not SPLIT.waits and SPLIT.max_registers == SPLIT.max_programs == SPLIT.weight_buffers == 0
