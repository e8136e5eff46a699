"""``LaunchConfig``: a pure choice whose blocks cover the work and bound the memory, and any hand-made one is right."""

import dataclasses
import math
from contextlib import contextmanager

import pytest
from auxhead.kernels import LaunchConfig, runs_triton
from auxhead.kernels.arrival_counters import ArrivalCounters
from auxhead.kernels.head_view import HeadView, head_view
from auxhead.kernels.launch_config import next_power_of_2
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.head_cases import DTYPES, assert_same_bits, check_head, feature_count, make_head

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
@example(samples=1, channels=1, positions=200_000, window_h=1, window_w=1, classes=1000, pool_max=False, element_size=2)
@example(samples=1, channels=3, positions=1, window_h=1, window_w=49, classes=200, pool_max=False, element_size=2)
@example(samples=257, channels=2048, positions=1, window_h=1, window_w=49, classes=1000, pool_max=False, element_size=2)
@example(samples=32, channels=300, positions=1, window_h=1, window_w=49, classes=1000, pool_max=False, element_size=2)
def test_choice_by_rule(samples, channels, positions, window_h, window_w, classes, **options):
    view = HeadView((samples, channels, window_h * positions, window_w), (0, 0, 0, 0), positions, 1)
    config = LaunchConfig.by_rule(view, classes, **options)
    assert config == LaunchConfig.by_rule(view, classes, **options)
    fields = dataclasses.asdict(config)
    several = config.block_n > 1 and channels * positions > config.block_f * config.block_s
    in_vectors = channels * positions % 16 == 0 and config.window_parts <= 4 and options["element_size"] < 4
    assert fields.pop("weight_buffers") == (3 if several and in_vectors else 0), "what Triton can read ahead"
    if config.block_n > 1 and config.block_s > 1 and options["element_size"] < 4:
        assert config.programs(view, classes).tiles <= 1024, "enough without any that share a tile's features"
    for name, value in fields.items():
        least = 0 if name in ("waits", "max_registers", "max_programs") else 1
        assert value >= least and value & (value - 1) == 0, f"{name} = {value} is no power of two"
    features = config.block_c * config.block_p
    if config.tiled:
        assert config.block_n == 1 or config.block_n >= 16, "tl.dot multiplies 16 and more"
        assert min(config.block_f, config.block_k) >= 16
        if config.block_n > 1 and options["element_size"] == 4:
            all_features = channels * positions
            assert config.block_s == 8 or all_features < 2 * config.block_s * config.block_f, "a long sum of float32"
    else:
        assert config.block_n == config.block_f == 1, "the features of a program are those that it pooled"
    assert config.window_parts == 1 or not options["pool_max"], "a maximum does not add up"
    assert config.num_warps <= 32

    # what one program holds at a time, in elements of 4 bytes; a streaming multiprocessor has 64 Ki registers
    limit = 32 * 1024
    assert features * config.block_a <= limit, "pool"
    assert config.block_k * (config.block_f if config.tiled else features) <= limit, "weight"
    assert config.block_n * (config.block_f + config.block_k) <= limit, "product"
    assert config.block_s * config.block_j <= limit, "softmax"

    # no block lies beyond the end of what it covers, and together they cover all of it
    programs = config.programs(view, classes)
    blocks_c, blocks_p = -(-channels // config.block_c), -(-positions // config.block_p)
    splits = programs.splits
    assert splits == blocks_c * blocks_p * config.window_parts
    for blocks, block, size in ((blocks_c, config.block_c, channels), (blocks_p, config.block_p, positions)):
        assert (blocks - 1) * block < size <= blocks * block
    if config.tiled:
        groups = math.ceil(samples / config.block_n)
        tiles = groups * math.ceil(classes / config.block_k) * config.block_s
        assert programs[1:4] == (samples * splits, tiles, samples)
        assert programs.zeroed == programs.features + programs.partial_sums
    else:
        assert programs[1:4] == (samples * splits, 0, 0) and programs.features == 0
        assert programs.zeroed == (programs.partial_sums if config.waits else samples)
    assert programs.partial_sums >= (1 if config.tiled else splits) * samples * classes


@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize("samples", [1, 15, 16, 32, 128])
@pytest.mark.parametrize("features", [25_088, 200_704])
def test_partial_sums_of_wide_features_stay_few(features, samples, classes):
    """Flattened maps, as VGG's: partial sums take [splits, samples, classes] of memory."""
    view = HeadView((samples, features, 1, 1), (0, 0, 0, 0), 1, 1)
    assert LaunchConfig.by_rule(view, classes).programs(view, classes).splits <= 512


@pytest.mark.parametrize("n, power", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(n, power):
    assert next_power_of_2(n) == power


def test_a_configuration_is_frozen_and_hashable():
    view = HeadView((1, 64, 1, 49), (0, 0, 0, 0), 1, 1)
    config = LaunchConfig.by_rule(view, 10)
    assert hash(config) == hash(LaunchConfig.by_rule(view, 10))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_n = 2


#: In the order of the fields, up to stages: samples, channels, positions, elements of a row, features, classes,
#: partial sums, classes of the softmax, parts of a window.
CONFIGS = {
    "chosen": None,
    "smallest": LaunchConfig(1, 1, 1, 1, 1, 4, 1, 2, 1, stages=1, num_warps=1),
    "few classes a step": LaunchConfig(1, 16, 1, 8, 1, 2, 1, 4, 1, stages=1, num_warps=4),
    "few splits a step": LaunchConfig(1, 2, 1, 4, 1, 16, 2, 16, 1, stages=4, num_warps=2),
    "more splits a step than there are": LaunchConfig(1, 8, 1, 4, 1, 16, 64, 16, 1, stages=1, num_warps=4),
    "two positions": LaunchConfig(1, 4, 2, 4, 1, 16, 4, 16, 1, stages=2, num_warps=4),
    "more positions than there are": LaunchConfig(1, 2, 64, 4, 1, 16, 4, 16, 1, stages=1, num_warps=4),
    "more channels than there are": LaunchConfig(1, 64, 4, 2, 1, 32, 4, 16, 1, stages=1, num_warps=4),
    "long rows": LaunchConfig(1, 4, 1, 128, 1, 16, 4, 16, 1, stages=4, num_warps=4),
    "two parts of a window": LaunchConfig(1, 4, 1, 2, 1, 16, 4, 16, 2, stages=1, num_warps=4),
    "more parts of a window than steps": LaunchConfig(1, 4, 2, 4, 1, 16, 4, 16, 8, stages=1, num_warps=4),
    "waits": LaunchConfig(1, 4, 1, 4, 1, 16, 4, 16, 2, stages=2, num_warps=4, waits=True),
    "waits, few classes of the softmax": LaunchConfig(1, 2, 2, 4, 1, 4, 2, 2, 1, stages=1, num_warps=4, waits=True),
    "waits, fewer classes a step than a row is padded to": LaunchConfig(
        1, 4, 1, 4, 1, 4, 4, 16, 1, stages=1, num_warps=4, waits=True
    ),
    "waits for more than there is": LaunchConfig(1, 64, 4, 2, 1, 32, 8, 64, 1, stages=1, num_warps=2, waits=True),
    "alone": LaunchConfig(1, 256, 4, 2, 1, 8, 1, 8, 1, stages=1, num_warps=4),
    "two programs for all": LaunchConfig(1, 4, 1, 4, 1, 16, 4, 16, 1, stages=1, num_warps=4, max_programs=2),
    "one program for all waits": LaunchConfig(
        1, 4, 1, 4, 1, 16, 4, 16, 1, stages=1, num_warps=4, waits=True, max_programs=1
    ),
    "few registers": LaunchConfig(1, 4, 1, 4, 1, 16, 4, 16, 1, stages=1, num_warps=4, max_registers=32),
    "tiles of a sample": LaunchConfig(1, 4, 1, 4, 16, 16, 1, 32, 1, stages=1, num_warps=4),
    "tiles of a sample, parts of a window": LaunchConfig(1, 8, 2, 2, 32, 16, 1, 8, 4, stages=1, num_warps=2),
    "tiles of a sample, one program for all": LaunchConfig(
        1, 4, 1, 4, 16, 16, 1, 32, 1, stages=1, num_warps=4, max_programs=1
    ),
    "tiles of a sample that share its features": LaunchConfig(1, 4, 1, 4, 16, 16, 2, 32, 1, stages=1, num_warps=4),
    "tiles that share the features": LaunchConfig(16, 16, 1, 4, 16, 16, 4, 16, 2, stages=1, num_warps=4),
    "tiles": LaunchConfig(16, 16, 1, 4, 16, 16, 1, 16, 1, stages=4, num_warps=4),
    "tiles, few classes of the softmax": LaunchConfig(16, 8, 2, 2, 32, 16, 1, 4, 1, stages=1, num_warps=4),
    "tiles, positions": LaunchConfig(16, 4, 8, 2, 16, 32, 1, 16, 1, stages=1, num_warps=8),
    "tiles, one program for all": LaunchConfig(16, 16, 4, 4, 16, 16, 1, 16, 1, stages=1, num_warps=4, max_programs=1),
    "tiles, weight in shared memory": LaunchConfig(16, 16, 1, 4, 16, 32, 2, 16, 2, 1, 4, weight_buffers=3),
    "tiles, more of everything than there is": LaunchConfig(32, 64, 16, 8, 128, 64, 1, 64, 1, stages=1, num_warps=8),
}
HEADS = {
    "one window": ((2, 11, 4, 3), "avg", 1),
    "one window of a padded map": ((3, 6, 4, 3), "max", 1),
    "3x2 windows": ((2, 3, 7, 5), "avg", (3, 2)),
    "3x2 maxima": ((3, 2, 5, 3), "max", (3, 2)),
    "flattened": ((2, 2, 3, 4), "none", 1),
}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("head", HEADS)
def test_hand_made_configurations(head, config, device):
    """The tuner tries them all: none may be wrong, and a kernel is not told apart by its speed alone."""
    from auxhead.kernels.fused_head_kernel import launch_fused_head

    shape, pool, pool_size = HEADS[head]
    tiled = config is not None and config.tiled
    if (
        tiled and config.block_n > 1
    ):  # a whole group and one sample more; the interpreter takes seconds for each of those
        shape = (17 if device.type == "cuda" or head == "one window" else 3, *shape[1:])
    classes = 19 if tiled else 7
    padded = (*shape[:3], shape[3] + 1) if "padded" in head or pool == "none" else shape
    x, _, _ = make_head(padded, 1, device=device)
    if not runs_triton(x):
        pytest.skip("needs the kernel")
    x = x[..., : shape[3]]
    _, weight, bias = make_head((1, feature_count(shape, pool, pool_size)), classes, device=device)
    size = (pool_size, pool_size) if isinstance(pool_size, int) else pool_size
    view = head_view(tuple(x.shape), x.stride(), pool, size)
    if config is None:
        config = LaunchConfig.by_rule(view, classes, pool_max=pool == "max", element_size=x.element_size())
    if config.window_parts > 1 and pool == "max":
        pytest.skip("a maximum does not add up")
    with taken_counters() as taken:
        out = launch_fused_head(
            x, view, weight, bias, 1.0, 0.5, pool_max=pool == "max", return_probs=True, config=config
        )
    assert not any(counters.any() for counters in taken), "what programs leave for each other is cleared"
    check_head(x, weight, bias, pool=pool, pool_size=pool_size, out=out)


@st.composite
def tiled_heads(draw):
    """A head of few programs, for the interpreter's sake, whose sizes no block divides, and a tiled configuration."""
    block_n = draw(st.sampled_from([1, 16, 32]))
    samples = draw(st.sampled_from([17, 31, 5, 16, 1] if block_n > 1 else [1, 3]))
    pool = draw(st.sampled_from(["avg", "max", "none"]))
    shape = (samples, draw(st.integers(1, 7)), draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    pool_size = (1, 1) if pool == "none" else draw(st.sampled_from([(1, 1), (2, 2), (3, 2), (1, 4)]))
    classes = draw(st.integers(1, 40))
    _, channels, height, width = shape
    positions = height * width if pool == "none" else pool_size[0] * pool_size[1]
    if pool == "none":
        channels, positions = channels * positions, 1
    # one or two programs a sample, and once many
    halves = draw(st.sampled_from([1, 2]))
    block_c = max(next_power_of_2(channels) // halves, 1) if samples > 1 else 1
    config = LaunchConfig(
        block_n=block_n,
        block_c=block_c,
        block_p=next_power_of_2(positions),
        block_a=draw(st.sampled_from([1, 2, 8])),
        block_f=draw(st.sampled_from([16, 64])),
        block_k=draw(st.sampled_from([16, 32])),
        block_s=draw(st.sampled_from([1, 2, 8])),
        block_j=draw(st.sampled_from([8, 64])),
        window_parts=1 if pool == "max" else draw(st.sampled_from([1, 2])),
        stages=draw(st.sampled_from([1, 4])),
        num_warps=4,
        weight_buffers=draw(st.sampled_from([0, 3])) if block_n > 1 else 0,
    )
    return shape, pool, pool_size, classes, config


@pytest.mark.usefixtures("poisoned_empty")
@settings(max_examples=10)
@given(
    head=tiled_heads(),
    dtype=st.sampled_from(list(DTYPES.values())),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_tiled_head(head, dtype, bias, seed, device):
    """Right, the same bits again, and with nothing left behind."""
    from auxhead.kernels.fused_head_kernel import launch_fused_head

    shape, pool, pool_size, classes, config = head
    x, weight, offset = make_head(
        shape, classes, pool=pool, pool_size=pool_size, dtype=dtype, device=device, bias=bias, seed=seed
    )
    if not runs_triton(x):
        pytest.skip("needs the kernel")
    view = head_view(tuple(x.shape), x.stride(), pool, pool_size)

    def launch():
        return launch_fused_head(
            x, view, weight, offset, 1.3, 0.4, pool_max=pool == "max", return_probs=True, config=config
        )

    with taken_counters() as taken:
        first = launch()
        check_head(x, weight, offset, pool=pool, pool_size=pool_size, temperature=1.3, threshold=0.4, out=first)
        assert_same_bits(first, launch())
    programs = config.programs(view, classes)
    assert [counters.numel() for counters in taken] == 2 * [programs.zeroed + 1], "one numbers what is drawn"
    assert not any(counters.any() for counters in taken)


@contextmanager
def taken_counters():
    """What launches take from ``ArrivalCounters`` meanwhile."""
    taken, take = [], ArrivalCounters.take

    def spy(self, count):
        taken.append(take(self, count))
        return taken[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrivalCounters, "take", spy)
        yield taken
