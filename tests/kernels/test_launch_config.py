"""launch_config.py: a LaunchConfig is frozen and hashable; registers of its threads."""

import dataclasses

import pytest
from auxhead.kernels import LaunchConfig
from auxhead.kernels.launch_config import most_registers, next_power_of_2


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
