"""jit/head.py: right with any LaunchConfig, chosen or made by hand, and workspace is zero after a launch."""

from contextlib import contextmanager

import pytest
import torch
from auxhead.kernels import LaunchConfig, runs_triton
from auxhead.kernels.launch.arrival_counters import ArrivalCounters
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_config import next_power_of_2
from auxhead.kernels.launch.launch_rule import config_by_rule
from hypothesis import given, settings
from hypothesis import strategies as st
from support.head_cases import DTYPES, assert_same_bits, check_head, feature_count, make_head

#: In the order of the fields, up to stages: samples, channels, positions, elements of a row, features, classes,
#: partial sums, classes of the softmax, parts of a window.
CONFIGS = {
    "chosen": None,
    "smallest": LaunchConfig(1, 1, 1, 1, 1, 4, 1, 2, 1, stages=1, num_warps=1),
    "few splits a step": LaunchConfig(1, 2, 1, 4, 1, 16, 2, 16, 1, stages=4, num_warps=2),
    "two positions": LaunchConfig(1, 4, 2, 4, 1, 16, 4, 16, 1, stages=2, num_warps=4),
    "more channels than there are": LaunchConfig(1, 64, 4, 2, 1, 32, 4, 16, 1, stages=1, num_warps=4),
    "more parts of a window than steps": LaunchConfig(1, 4, 2, 4, 1, 16, 4, 16, 8, stages=1, num_warps=4),
    "waits": LaunchConfig(1, 4, 1, 4, 1, 16, 4, 16, 2, stages=2, num_warps=4, waits=True),
    "waits, fewer classes a step than a row is padded to": LaunchConfig(
        1, 4, 1, 4, 1, 4, 4, 16, 1, stages=1, num_warps=4, waits=True
    ),
    "waits for more than there is": LaunchConfig(1, 64, 4, 2, 1, 32, 8, 64, 1, stages=1, num_warps=2, waits=True),
    "alone": LaunchConfig(1, 256, 4, 2, 1, 8, 1, 8, 1, stages=1, num_warps=4),
    "two programs for all": LaunchConfig(1, 4, 1, 4, 1, 16, 4, 16, 1, stages=1, num_warps=4, max_programs=2),
    "one program for all waits": LaunchConfig(
        1, 4, 1, 4, 1, 16, 4, 16, 1, stages=1, num_warps=4, waits=True, max_programs=1
    ),
    "tiles of a sample": LaunchConfig(1, 4, 1, 4, 16, 16, 1, 32, 1, stages=1, num_warps=4),
    "tiles of a sample, parts of a window": LaunchConfig(1, 8, 2, 2, 32, 16, 1, 8, 4, stages=1, num_warps=2),
    "tiles of a sample that share its features": LaunchConfig(1, 4, 1, 4, 16, 16, 2, 32, 1, stages=1, num_warps=4),
    "tiles that share the features": LaunchConfig(16, 16, 1, 4, 16, 16, 4, 16, 2, stages=1, num_warps=4),
    "tiles": LaunchConfig(16, 16, 1, 4, 16, 16, 1, 16, 1, stages=4, num_warps=4),
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
def test_hand_made_configurations(config, device):
    """The tuner tries them all: none may be wrong, and a kernel is not told apart by its speed alone."""
    for head in HEADS:
        from auxhead.kernels.fused_head import launch_fused_head

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
            config = config_by_rule(HeadShape.of(view, classes, pool_max=pool == "max", dtype=x.dtype))
        if config.window_parts > 1 and pool == "max":
            continue  # a maximum does not add up
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
    classes = draw(st.integers(2, 40))
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
@settings(max_examples=10 if torch.cuda.is_available() else 5)
@given(
    head=tiled_heads(),
    dtype=st.sampled_from(list(DTYPES.values())),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_tiled_head(head, dtype, bias, seed, device):
    """Right, the same bits again, and with nothing left behind."""
    from auxhead.kernels.fused_head import launch_fused_head

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
