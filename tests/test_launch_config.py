"""``LaunchConfig``: a pure choice whose blocks cover the work and bound the memory, and any hand-made one is right."""

import dataclasses

import pytest
from auxhead.kernels import LaunchConfig, runs_triton
from auxhead.kernels.head_view import HeadView, head_view
from auxhead.kernels.launch_config import next_power_of_2
from head_cases import check_head, feature_count, make_head
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = {
    "samples": st.integers(1, 70_000),
    "channels": st.integers(1, 4096) | st.just(200_704),
    "positions": st.integers(1, 100) | st.integers(1, 50_000),
    "window_h": st.integers(1, 256),
    "window_w": st.integers(1, 50_000),
    "classes": st.integers(1, 32_000),
    "pool_max": st.booleans(),
    "element_size": st.sampled_from([2, 4]),
}


@settings(max_examples=500)
@given(**SIZES)
def test_choice(samples, channels, positions, window_h, window_w, classes, **options):
    view = HeadView((samples, channels, window_h * positions, window_w), (0, 0, 0, 0), positions, 1)
    config = LaunchConfig.choose(view, classes, **options)
    LaunchConfig.choose.cache_clear()
    assert config == LaunchConfig.choose(view, classes, **options)
    for name, value in dataclasses.asdict(config).items():
        assert value >= 1 and value & (value - 1) == 0, f"{name} = {value} is no power of two"
    assert config.block_n == 1 or config.block_n >= 16
    features = config.block_c * config.block_p
    if config.block_n > 1:
        assert features >= 16 and config.block_k >= 16, "tl.dot multiplies blocks of 16 and more"
    assert config.num_warps <= 32

    # what one program holds at a time, in elements of 4 bytes; a streaming multiprocessor has 64 Ki registers
    limit = 32 * 1024
    assert config.block_n * features * config.block_a <= limit, "pool"
    assert config.block_k * features <= limit, "weight"
    assert config.block_n * config.block_k <= limit, "product"
    assert config.block_s * config.block_n * config.block_j <= limit, "softmax"

    # no block lies beyond the end of what it covers, and together they cover all of it
    groups, splits = config.programs(samples, channels, positions)
    blocks_p = -(-positions // config.block_p)
    blocks_c, rest = divmod(splits, blocks_p * config.window_parts)
    assert rest == 0
    assert config.window_parts == 1 or not options["pool_max"], "a maximum does not add up"
    for blocks, block, size in (
        (groups, config.block_n, samples),
        (blocks_c, config.block_c, channels),
        (blocks_p, config.block_p, positions),
    ):
        assert (blocks - 1) * block < size <= blocks * block


@pytest.mark.parametrize("n, power", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(n, power):
    assert next_power_of_2(n) == power


def test_a_configuration_is_frozen_and_hashable():
    view = HeadView((1, 64, 1, 49), (0, 0, 0, 0), 1, 1)
    config = LaunchConfig.choose(view, 10)
    assert hash(config) == hash(LaunchConfig.choose(view, 10))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_n = 2


CONFIGS = {
    "chosen": None,
    "smallest": LaunchConfig(1, 1, 1, 1, 4, 1, 2, 1, num_warps=1),
    "few classes a step": LaunchConfig(1, 16, 1, 8, 2, 1, 4, 1, num_warps=4),
    "few splits a step": LaunchConfig(1, 2, 1, 4, 16, 2, 16, 1, num_warps=2),
    "more splits a step than there are": LaunchConfig(1, 8, 1, 4, 16, 64, 16, 1, num_warps=4),
    "two positions": LaunchConfig(1, 4, 2, 4, 16, 4, 16, 1, num_warps=4),
    "more positions than there are": LaunchConfig(1, 2, 64, 4, 16, 4, 16, 1, num_warps=4),
    "more channels than there are": LaunchConfig(1, 64, 4, 2, 32, 4, 16, 1, num_warps=4),
    "long rows": LaunchConfig(1, 4, 1, 128, 16, 4, 16, 1, num_warps=4),
    "groups of 16": LaunchConfig(16, 16, 1, 4, 16, 2, 4, 1, num_warps=4),
    "groups of 16, positions": LaunchConfig(16, 4, 8, 2, 32, 2, 16, 1, num_warps=8),
    "groups of 32": LaunchConfig(32, 8, 4, 1, 16, 1, 8, 1, num_warps=8),
    "two parts of a window": LaunchConfig(1, 4, 1, 2, 16, 4, 16, 2, num_warps=4),
    "more parts of a window than steps": LaunchConfig(1, 4, 2, 4, 16, 4, 16, 8, num_warps=4),
    "groups of 16, parts": LaunchConfig(16, 16, 1, 4, 16, 2, 16, 4, num_warps=4),
}
HEADS = {
    "one window": ((2, 19, 4, 3), "avg", 1),
    "one window of a padded map": ((3, 6, 4, 3), "max", 1),
    "3x2 windows": ((2, 3, 7, 5), "avg", (3, 2)),
    "3x2 maxima": ((3, 2, 5, 3), "max", (3, 2)),
    "flattened": ((2, 3, 3, 4), "none", 1),
}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_hand_made_configurations(head, config, device):
    """The tuner tries them all: none may be wrong, and a kernel is not told apart by its speed alone."""
    from auxhead.kernels.fused_head_kernel import launch_fused_head

    shape, pool, pool_size = HEADS[head]
    if config is not None and config.block_n > 1:  # a whole group and one sample more
        shape = (config.block_n + 1, *shape[1:])
    classes = 7
    padded = (*shape[:3], shape[3] + 1) if "padded" in head or pool == "none" else shape
    x, _, _ = make_head(padded, 1, device=device)
    if not runs_triton(x):
        pytest.skip("needs the kernel")
    x = x[..., : shape[3]]
    _, weight, bias = make_head((1, feature_count(shape, pool, pool_size)), classes, device=device)
    size = (pool_size, pool_size) if isinstance(pool_size, int) else pool_size
    view = head_view(tuple(x.shape), x.stride(), pool, size)
    if config is None:
        config = LaunchConfig.choose(view, classes, pool_max=pool == "max", element_size=x.element_size())
    if config.window_parts > 1 and pool == "max":
        pytest.skip("a maximum does not add up")
    out = launch_fused_head(
        x, view, weight, bias, 1.0, 0.5, pool_max=pool == "max", return_probs=True, config=config
    )  # fmt: skip
    check_head(x, weight, bias, pool=pool, pool_size=pool_size, out=out)
