"""launch_config.py: a LaunchConfig is frozen and hashable."""

import dataclasses

import pytest
from auxhead.kernels import LaunchConfig
from auxhead.kernels.launch_config import next_power_of_2


@pytest.mark.parametrize("n, power", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(n, power):
    assert next_power_of_2(n) == power


def test_a_configuration_is_frozen_and_hashable():
    config, same = (LaunchConfig(1, 16, 1, 64, 1, 16, 1, 16, 1, stages=1, num_warps=4) for _ in range(2))
    assert hash(config) == hash(same)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_n = 2
