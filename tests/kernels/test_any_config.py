"""jit/head.py: right with any LaunchConfig, chosen or made by hand, and workspace is zero after a launch."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
from auxhead.kernels import (
    ExitBuffers,
    ExitHead,
    ExitLaunch,
    LaunchConfig,
    fused_head,
    fused_head_reference,
    runs_triton,
)
from auxhead.kernels.launch.choose_config import choose_config
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_config import by_library, next_power_of_2
from auxhead.kernels.launch.launch_rule import config_by_rule
from hypothesis import given, settings
from hypothesis import strategies as st
from support.head_cases import (
    DTYPES,
    assert_same_bits,
    check_head,
    feature_count,
    launched_as,
    make_head,
    make_input,
    taken_counters,
)
from support.hidden_layer_cases import LAYERS, check, make
from support.layouts import LAYOUTS

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
    "a library's product": replace(by_library(7), block_c=4, block_p=2, block_a=4),
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


# Features that lie in memory before they are multiplied: packed by a launch before, or in x

PACKED = LaunchConfig(8, 8, 2, 2, 16, 16, 2, 32, 1, 1, 4, weight_buffers=2, features="packed")
IN_PLACE = LaunchConfig(8, 8, 8, 1, 64, 16, 2, 32, 1, 1, 4, weight_buffers=2, features="in place")
READING = {
    "packed": PACKED,
    "packed, few classes a step": replace(PACKED, block_j=8, block_s=1, weight_buffers=5),
    "packed, more of everything than there is": LaunchConfig(
        32, 64, 16, 8, 128, 64, 4, 64, 1, stages=4, num_warps=8, weight_buffers=3, features="packed"
    ),
    "packed, few programs": replace(PACKED, max_programs=3),
    "packed, programs of its own for a last layer": replace(PACKED, last_rows=16),
    "in place": IN_PLACE,
    "in place, a position a step": replace(IN_PLACE, block_c=16, block_p=1, block_f=16, block_s=1),
    "in place, more of everything than there is": replace(
        IN_PLACE, block_n=32, block_c=16, block_f=128, block_k=64, block_j=64, block_s=4, weight_buffers=3
    ),
    "in place, few programs and classes a step": replace(IN_PLACE, block_j=16, max_programs=3),
    "in place, few programs, of its own for a last layer": replace(IN_PLACE, max_programs=3, last_rows=32),
}
#: Shape, layout, pool and its size, hidden layers; windows of different sizes, and sizes that no block divides.
UNPOOLED = [
    ((9, 5, 3, 3), "channels_last", "none", (1, 1), "relu, linear"),
    ((9, 13, 2, 3), "channels_last", "none", (1, 1), "norm"),
    ((3, 5, 2, 3), "steps", "none", (1, 1), None),
    ((9, 5, 2, 3), "padded_rows", "none", (1, 1), "all"),
    ((9, 3, 5), "steps", "none", (1, 1), "norm, linear"),
    ((9, 3, 19), "without_class_token", "first", (1, 1), "bare norm"),
    ((17, 37), "steps", "avg", (1, 1), "relu"),
    ((1, 70), "transposed", "max", (1, 1), None),
]
TURNED = UNPOOLED[:2]
POOLED = [
    ((9, 5, 3, 3), "nchw", "avg", (1, 1), "all"),
    ((9, 21, 3, 5), "channels_last", "avg", (1, 1), "linear"),
    ((9, 5, 3, 5), "channels_last", "avg", (2, 3), "relu"),
    ((3, 3, 5, 3), "steps", "max", (3, 2), "all"),
    ((9, 3, 5, 3), "padded_rows", "max", (1, 1), "relu, linear"),
    ((9, 5, 21), "steps", "avg", (1, 1), "norm"),
    ((3, 4, 6), "transposed", "max", (1, 1), None),
]


def check_reading(head, config, classes, dtype, device, *, bias=True, again=True):
    """Right, the same bits again, and with nothing left behind."""
    shape, layout, pool, pool_size, layers = head
    x = LAYOUTS[len(shape)][layout](partial(make_input, dtype=dtype, device=device), *shape)
    if not runs_triton(x):
        pytest.skip("needs the kernel")
    options = {"bias": bias, **LAYERS.get(layers, {}), "pool": pool, "pool_size": pool_size}
    _, weight, shift, hidden = make(shape, classes, dtype=dtype, device=device, **options)
    with launched_as(config, x, hidden.rows(classes), pool, pool_size), taken_counters() as taken:
        first = check(x, weight, shift, hidden, pool=pool, pool_size=pool_size)
        if again:
            options = {"pool": pool, "pool_size": pool_size, "threshold": 0.5, "hidden": hidden}
            assert_same_bits(first, fused_head(x, weight, shift, **options))
        view, pool_max = head_view(tuple(x.shape), x.stride(), pool, pool_size), pool == "max"
        fitted = choose_config(view, classes, pool_max=pool_max, dtype=dtype, device=x.device, hidden=hidden)
    assert not any(counters.any() for counters in taken)
    programs = fitted.programs(view, classes, hidden)
    assert {counters.numel() for counters in taken} == {programs.zeroed + 1}


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("config", READING.values(), ids=READING)
def test_features_in_memory(config, device):
    for number, head in enumerate(UNPOOLED + POOLED * config.packs):
        if config.in_place and config.block_p == 1 and head in TURNED:
            continue  # no configuration of it: see tuned_table.py
        dtype, again = list(DTYPES.values())[number % 3], device.type == "cuda" or number % 5 == 0
        check_reading(head, config, 19 + number, dtype, device, bias=number % 2 == 0, again=again)


@st.composite
def reading_heads(draw):
    """A head whose features lie in memory before they are multiplied, and a configuration."""
    head = draw(st.sampled_from(UNPOOLED + POOLED))
    config = LaunchConfig(
        block_n=draw(st.sampled_from([8, 16, 32])),
        block_c=draw(st.sampled_from([8, 32])),
        block_p=draw(st.sampled_from([8, 16] if head in TURNED else [1, 2, 8])),
        block_a=draw(st.sampled_from([1, 2, 8])),
        block_f=draw(st.sampled_from([16, 64])),
        block_k=draw(st.sampled_from([16, 32])),
        block_s=draw(st.sampled_from([1, 2, 8])),
        block_j=draw(st.sampled_from([4, 16, 64])),
        window_parts=1,
        stages=draw(st.sampled_from([1, 4])),
        num_warps=4,
        max_programs=draw(st.sampled_from([0, 0, 2])),
        last_rows=draw(st.sampled_from([0, 16])),
        weight_buffers=draw(st.integers(1, 5)),
        features="packed",
    )
    if head in UNPOOLED and draw(st.booleans()):
        block_f = max(config.block_c * config.block_p, 16)
        config = replace(config, features="in place", block_f=block_f, block_c=block_f // config.block_p)
    return head, config


@pytest.mark.usefixtures("poisoned_empty")
@settings(max_examples=60 if torch.cuda.is_available() else 12)
@given(
    drawn=reading_heads(), classes=st.integers(10, 40), dtype=st.sampled_from(list(DTYPES.values())), bias=st.booleans()
)
def test_any_features_in_memory(drawn, classes, dtype, bias, device):
    check_reading(*drawn, classes, dtype, device, bias=bias)


#: Heads for 9 samples, launched in different ways.
TOGETHER = [
    (UNPOOLED[0], replace(IN_PLACE, block_n=16)),
    (POOLED[0], replace(PACKED, last_rows=16)),
    (POOLED[2], LaunchConfig(1, 4, 2, 4, 1, 16, 4, 16, 1, stages=2, num_warps=4)),
    (UNPOOLED[1], PACKED),
    (POOLED[4], LaunchConfig(16, 16, 4, 4, 16, 16, 2, 16, 1, stages=1, num_warps=4)),
    (UNPOOLED[5], replace(IN_PLACE, block_p=1, block_f=16, block_c=16)),
]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("programs", [0, 5])
def test_heads_of_all_ways_in_one_launch(programs, device):
    heads, inputs, outputs = [], [], []
    one, limit = torch.ones((), device=device), torch.full((), 0.3, device=device)
    with ExitStack() as stack:
        for (shape, layout, pool, pool_size, layers), config in TOGETHER:
            x = LAYOUTS[len(shape)][layout](partial(make_input, device=device), *shape)
            options = {**LAYERS.get(layers, {}), "pool": pool, "pool_size": pool_size, "device": device}
            _, weight, bias, hidden = make(shape, 11, **options)
            config = replace(config, max_programs=programs)
            stack.enter_context(launched_as(config, x, hidden.rows(11), pool, pool_size))
            head = ExitHead(weight, bias, one, limit, pool, pool_size, hidden=hidden)
            options = {"pool": pool, "pool_size": pool_size, "temperature": one, "threshold": limit, "hidden": hidden}
            outputs.append(fused_head_reference(x, weight, bias, **options))
            heads.append(head)
            inputs.append(x)
        buffers = ExitBuffers.allocate(len(heads), 9, 11, with_probs=True, device=device)
        launch = ExitLaunch(buffers, 0, heads)
        for _ in range(2):
            buffers.probs.fill_(float("nan"))
            launch(inputs)
            ways = [space.config.features for space in launch._spaces.values()]
            assert ways == [config.features for _, config in TOGETHER] and launch.packed == [1, 3]
            for place, output in enumerate(outputs):
                torch.testing.assert_close(buffers.probs[place], output.probs)
                assert torch.equal(buffers.label[place], output.label)
            for space in launch._spaces.values():
                features, partial_sums, arrived, statistics = space.arguments.workspace
                zeroed = [arrived, statistics, partial_sums if space.constants.hands_over else None]
                zeroed.append(space.arguments.last[-1] if space.constants.last_n else None)
                assert not any(one.any() for one in zeroed if one is not None)
                assert space.constants.reads or features is None or not features.any()
