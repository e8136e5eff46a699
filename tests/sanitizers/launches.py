"""Script: launches every kernel on a GPU, small and odd, for a sanitizer: ``python launches.py PART PARTS``.

A part is every PARTS-th case, so that several processes share the work. What each launch has written is copied to the
host, which a tool takes for a read. Workspaces of ``ExitLaunch`` are as long as they are used, those of the operator
longer (``ArrivalCounters``): so each way to multiply is launched by both. Prints how often each kernel ran.
"""

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from auxhead.kernels import (
    ExitBuffers,
    ExitHead,
    ExitLaunch,
    HiddenLayers,
    LaunchConfig,
    attend,
    fused_conv2d,
    fused_head,
    max_pool2d,
)
from auxhead.kernels.compaction import collect, destination, gather_open, new_destinations
from auxhead.kernels.launch.choose_config import overriding
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.residency import recording
from support.head_cases import DTYPES, feature_count, make_input, make_linear
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS
from torch import Tensor

DEVICE = torch.device("cuda", 0)
FP32, FP16, BF16 = DTYPES.values()
#: Launch configurations for 144 channels and 77 classes; programs meet by counters in the first ones.
GROUPS = LaunchConfig(16, 64, 1, 16, 64, 64, 2, 128, 1, stages=1, num_warps=4)
SPLIT = LaunchConfig(1, 32, 1, 16, 1, 32, 4, 128, 1, stages=1, num_warps=4)
PACKED = LaunchConfig(8, 32, 8, 16, 64, 64, 2, 32, 1, 1, 4, weight_buffers=3, features="packed")
WAYS = {
    "split": SPLIT,
    "split, several steps": replace(SPLIT, block_j=32, block_s=2),
    "split, parts of a window": replace(SPLIT, window_parts=2),
    "split, few programs": replace(SPLIT, max_programs=4),
    "one program a sample": LaunchConfig(1, 256, 1, 16, 1, 128, 1, 128, 1, stages=2, num_warps=8),
    "split, the last one waits": replace(SPLIT, waits=True),
    "tiles of a sample": LaunchConfig(1, 16, 1, 16, 64, 16, 1, 128, 1, stages=1, num_warps=8),
    "tiles that share the features": LaunchConfig(1, 16, 1, 16, 64, 32, 4, 128, 2, stages=1, num_warps=4),
    "tiles of 16 samples": GROUPS,
    "tiles, few programs": replace(GROUPS, max_programs=5),
    "weight in shared memory": replace(GROUPS, block_f=32, weight_buffers=3),
    "packed": PACKED,
    "packed, few programs": replace(PACKED, max_programs=5),
    "packed, in slices": replace(PACKED, block_s=1),
}
#: In place, of vectors, of maps whose channels lie side by side, and of others; what packs turns the former.
IN_PLACE = replace(PACKED, block_c=8, block_p=16, block_f=128, features="in place")
UNPOOLED = {
    "vectors in place": ((17, 144), None, replace(IN_PLACE, block_c=64, block_p=1, block_f=64)),
    "turned map in place": ((9, 37, 5, 7), "channels_last", IN_PLACE),
    "map in place": ((9, 37, 5, 7), "padded_rows", replace(IN_PLACE, max_programs=5)),
    "vectors in slices": ((17, 144), None, replace(IN_PLACE, block_c=64, block_p=1, block_f=64, block_s=1)),
    "turned map, packed": ((9, 37, 5, 7), "channels_last", PACKED),
}
#: Of maps [3, 37, 5, 7]: layout, dtype, pool and its size; each of them several times.
MAPS = [
    ("nchw", FP32, "avg", 1),
    ("channels_last", FP16, "avg", 1),
    ("steps", BF16, "avg", 1),
    ("nchw", FP16, "max", 1),
    ("channels_last", BF16, "max", (2, 3)),
    ("channels_last_slice", FP32, "max", 3),
    ("offset", FP16, "avg", (2, 3)),
    ("nchw", BF16, "avg", 3),
    ("channels_last", FP32, "none", 1),
    ("transposed_hw", FP16, "none", 1),
    ("expanded_channels", FP32, "avg", 2),
    ("padded_rows", BF16, "max", (4, 1)),
]
#: Of tokens [3, 5, 33].
TOKENS = [
    ("steps", FP16, "avg"),
    ("without_class_token", FP32, "max"),
    ("transposed", BF16, "first"),
    ("steps", FP32, "none"),
]


def host(*written: Tensor | None) -> None:
    """Read all that was written."""
    for tensor in written:
        if tensor is not None:
            tensor.cpu()


def run_head(
    x: Tensor,
    classes: int,
    *,
    pool: str = "avg",
    pool_size: int | tuple[int, int] = 1,
    config: LaunchConfig | None = None,
    bias: bool = True,
    rules: bool = False,
    **options: bool,
) -> None:
    """Run the operator twice, under rules on the device or numbers."""
    grid = (pool_size, pool_size) if isinstance(pool_size, int) else pool_size
    weight, shift = make_linear(feature_count(x.shape, pool, grid), classes, dtype=x.dtype, device=DEVICE, bias=bias)
    heat, limit = (torch.tensor(1.5, device=DEVICE), torch.tensor(0.3, device=DEVICE)) if rules else (1.5, 0.3)
    view = head_view(tuple(x.shape), x.stride(), pool, grid)
    shape = HeadShape.of(view, classes, pool_max=pool == "max", dtype=x.dtype)
    with overriding({} if config is None else {shape: config}):
        for _ in range(2):
            host(*fused_head(x, weight, shift, pool=pool, pool_size=grid, temperature=heat, threshold=limit, **options))


def run_way(config: LaunchConfig, samples: int) -> None:
    """Run one head by itself as a network's exit."""
    x = make_input((samples, 144, 5, 7), dtype=FP16, device=DEVICE)
    weight, bias = make_linear(144, 77, dtype=FP16, device=DEVICE)
    head = ExitHead(weight, bias, torch.tensor(1.5, device=DEVICE), torch.tensor(0.3, device=DEVICE), "avg", (1, 1))
    view = head_view(tuple(x.shape), x.stride(), "avg", (1, 1))
    buffers = ExitBuffers.allocate(1, samples, 77, with_probs=True, device=DEVICE)
    launch = ExitLaunch(buffers, 0, [head])
    with overriding({HeadShape.of(view, 77, pool_max=False, dtype=FP16): config}):
        for _ in range(2):
            launch([x])
    host(buffers.packed_answer, buffers.probs, buffers.label, buffers.exits)


def run_hidden(
    samples: int, channels: int, width: int | None, classes: int, dtype: torch.dtype, *, norms: bool
) -> None:
    """Run a head with a leading ReLU, by itself and twice in a network, the second counting who agrees."""
    x = make_input((samples, channels, 5, 7), dtype=dtype, device=DEVICE)
    hidden = HiddenLayers(rectifies=True)
    if norms:
        scale, shift = make_linear(channels, 2, dtype=dtype, device=DEVICE)[0]
        hidden = hidden._replace(eps=1e-5, norm_weight=scale, norm_bias=shift)
    if width is not None:
        first, offset = make_linear(channels, width, dtype=dtype, device=DEVICE)
        hidden = hidden._replace(weight=first, bias=offset, activation="gelu")
    weight, bias = make_linear(width or channels, classes, dtype=dtype, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    heads = [
        ExitHead(weight, bias, one, limit * one, "avg", (1, 1), criterion, hidden)
        for criterion, limit in (("max_prob", 0.9), ("patience", 1.0))
    ]
    buffers = ExitBuffers.allocate(2, samples, classes, with_probs=True, device=DEVICE)
    launch = ExitLaunch(buffers, 0, heads)
    for _ in range(2):
        host(*fused_head(x, weight, bias, hidden=hidden))
        launch([x, x])
    host(buffers.packed_answer, buffers.probs, buffers.label, buffers.confidence, buffers.exits)


def run_exits(
    samples: int,
    valid: int,
    classes: int,
    lasts: Sequence[int],
    *,
    logits: bool = False,
    publishes: bool = False,
    condition: bool = False,
    dtype: torch.dtype = FP32,
) -> None:
    """Run three heads and a classifier in launches that end at the places ``lasts``."""
    inputs = [
        make_input((samples, 8, 6, 6), dtype=dtype, device=DEVICE),
        make_input((samples, 13, 5, 5), dtype=dtype, device=DEVICE).contiguous(memory_format=torch.channels_last),
        make_input((samples, 7, 16), dtype=dtype, device=DEVICE),
        make_input((samples, classes) if logits else (samples, 9, 3, 3), dtype=dtype, device=DEVICE),
    ]
    heads: list[ExitHead | None] = []
    for x, pool, size in zip(inputs, ("avg", "max", "first", "avg"), (2, 1, 1, 1), strict=True):
        weight, bias = make_linear(feature_count(x.shape, pool, size), classes, dtype=dtype, device=DEVICE)
        one = torch.ones(1, device=DEVICE)
        heads.append(ExitHead(weight, bias, one, 0.3 * one, pool, (size, size)))
    if logits:
        heads[3] = None
    buffers = ExitBuffers.allocate(4, samples, classes, with_probs=True, device=DEVICE)
    buffers.valid.fill_(valid)
    published = torch.zeros(4, dtype=torch.int64, pin_memory=DEVICE.type == "cuda")
    launches, first = [], 0
    for last in lasts:
        launch = ExitLaunch(
            buffers,
            first,
            heads[first : last + 1],
            open_samples=published[first : first + 1] if publishes else None,
            condition=torch.zeros(1, dtype=torch.int64, device=DEVICE) if condition else None,
        )
        launches.append((launch, inputs[first : last + 1]))
        first = last + 1
    for _ in range(2):
        for launch, some in launches:
            launch(some)
    host(buffers.packed_answer, buffers.probs, buffers.label, buffers.confidence, buffers.exits)


def run_recorded() -> None:
    """Record the programs of a network's exits and of the operator."""
    x = make_input((3, 37, 5, 7), device=DEVICE)
    with recording() as recorded:
        run_exits(5, 5, 10, (3,))
        run_head(x, 10)
    host(*(launch.turns for launch in recorded))


def run_compaction(row: tuple[int, ...], dtype: torch.dtype, classes: int | None) -> None:
    """Move 3 open rows of 7 into a batch of 4, and collect the answers."""
    big, small, request = (
        ExitBuffers.allocate(4, samples, classes or 3, with_probs=classes is not None, device=DEVICE)
        for samples in (7, 4, 7)
    )
    features = make_input((7, 24), device=DEVICE).to(dtype)[:, :1].repeat(1, torch.Size(row).numel()).view(7, *row)
    smaller = torch.empty(4, *row, dtype=dtype, device=DEVICE)
    origin, answer = torch.full((4,), -1, device=DEVICE), request.answer(request.packed_answer)
    big.answer(big.packed_answer)[1].copy_(torch.tensor([0, -1, 2, 1, -1, -1, 0]))
    destinations = new_destinations(big)
    destinations[1:5] = torch.tensor(destination(smaller, origin, small), device=DEVICE)
    gather_open(features, big, None, destinations, answer)
    small.answer(small.packed_answer)[1].copy_(torch.tensor([3, 1, 2, 0]))
    collect(small, origin, answer)
    host(smaller[:3], origin, request.packed_answer, small.requests)


def run_max_pool(shape: tuple[int, ...], dtype: torch.dtype, *arguments: int | tuple[int, int]) -> None:
    x = make_input(shape, dtype=dtype, device=DEVICE).contiguous(memory_format=torch.channels_last)
    host(max_pool2d(x, *arguments))


def run_convolution(
    shape: tuple[int, ...], outputs: int, window: tuple[int, int], stride: tuple[int, int], following: str
) -> None:
    """A depthwise one for as many outputs as channels; one with an addend where there is an activation; all in rows."""
    x = make_input(shape, dtype=FP16, device=DEVICE).contiguous(memory_format=torch.channels_last)
    channels = 1 if outputs == shape[1] else shape[1]
    weight, (bias,) = (
        make_input(each, dtype=FP16, device=DEVICE) for each in ((outputs, channels, *window), (1, outputs))
    )
    weight = weight.contiguous(memory_format=torch.channels_last)
    sizes = stride, tuple(each // 2 for each in window), (1, 1)
    given = x, weight, bias, sizes, shape[1] // channels, following
    y = fused_conv2d(*given)
    host(fused_conv2d(*given, y) if channels > 1 and following else y)
    # never copied: a copy would read what nobody wrote
    wide = torch.empty(
        len(y), y.shape[1] + 24, *y.shape[2:], dtype=y.dtype, device=DEVICE, memory_format=torch.channels_last
    )
    host(fused_conv2d(*given, out=wide[:, 8 : 8 + y.shape[1]]))


def run_attention(samples: int, heads: int, tokens: int, numbers: int, biases: int) -> None:
    product = make_input((samples, tokens, 3 * heads * numbers), dtype=FP16, device=DEVICE)
    bias = make_input((biases, heads, tokens, tokens), dtype=FP16, device=DEVICE) if biases else None
    host(attend(*(each.transpose(1, 2) for each in product.unflatten(2, (3, heads, -1)).unbind(2)), bias))


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """All launches, by name."""
    for number, (layout, dtype, pool, size) in enumerate(MAPS):
        x = MAP_LAYOUTS[layout](partial(make_input, dtype=dtype, device=DEVICE), 3, 37, 5, 7)
        options = {"pool": pool, "pool_size": size, "rules": number % 2 == 0}
        yield f"map {layout}, {dtype}, {pool} {size}", partial(run_head, x, 10 if number % 3 else 130, **options)
    for layout, dtype, pool in TOKENS:
        x = TOKEN_LAYOUTS[layout](partial(make_input, dtype=dtype, device=DEVICE), 3, 5, 33)
        yield f"tokens {layout}, {dtype}, {pool}", partial(run_head, x, 10, pool=pool)
    for dtype in (FP32, FP16, BF16):
        vectors = make_input((33, 129), dtype=dtype, device=DEVICE)
        yield f"vectors, {dtype}", partial(run_head, vectors, 130, return_probs=dtype != FP16)
    for samples in (1, 3, 33):
        x = make_input((samples, 64, 5, 5), dtype=FP16, device=DEVICE)
        yield f"many classes, {samples} samples", partial(run_head, x, 1030, bias=samples != 3)
    for name, config in WAYS.items():
        samples = 17 if config.block_n > 1 else 3
        x = make_input((samples, 144, 5, 7), dtype=FP16, device=DEVICE)
        yield f"operator, {name}", partial(run_head, x, 77, config=config)
        yield f"exit, {name}", partial(run_way, config, samples)
    for name, (shape, layout, config) in UNPOOLED.items():
        for dtype in (FP32, BF16):
            make = partial(make_input, dtype=dtype, device=DEVICE)
            x = make(shape) if layout is None else MAP_LAYOUTS[layout](make, *shape)
            yield f"{name}, {dtype}", partial(run_head, x, 77, pool="none", config=config)
    yield "exits, a launch for all", partial(run_exits, 5, 2, 10, (3,), logits=True)
    yield "exits, two and two, published", partial(run_exits, 5, 5, 10, (1, 3), publishes=True)
    yield "exits, a launch each", partial(run_exits, 1, 1, 10, (0, 1, 2, 3), logits=True, dtype=BF16)
    yield "exits, tiles", partial(run_exits, 33, 31, 130, (2, 3), dtype=FP16)
    yield "exits, several softmax steps", partial(run_exits, 2, 2, 1030, (3,), dtype=FP16)
    yield "exits, a condition", partial(run_exits, 3, 3, 10, (1, 3), condition=True)
    yield "hidden layer", partial(run_hidden, 3, 37, 33, 10, FP16, norms=False)
    yield "hidden layer, groups of samples", partial(run_hidden, 17, 144, 128, 130, BF16, norms=False)
    yield "hidden layer, several steps of classes", partial(run_hidden, 2, 37, 1000, 1030, FP32, norms=False)
    yield "norm", partial(run_hidden, 3, 37, None, 10, FP32, norms=True)
    yield "norm and hidden layer", partial(run_hidden, 3, 144, 65, 77, FP16, norms=True)
    yield "norm of packed features", partial(run_hidden, 9, 4096, 64, 10, FP16, norms=True)
    yield "residency", run_recorded
    yield "attention, odd sizes", partial(run_attention, 2, 3, 67, 20, 0)
    yield "attention, of windows", partial(run_attention, 4, 2, 49, 32, 2)
    yield "compaction, odd rows", partial(run_compaction, (7, 3, 5), FP32, 3)
    yield "compaction, bytes", partial(run_compaction, (1,), torch.uint8, None)
    yield "compaction, several blocks", partial(run_compaction, (5, 33, 13), FP16, 1030)
    yield "depthwise, several blocks of channels", partial(run_convolution, (1, 72, 13, 12), 72, (5, 3), (2, 1), "silu")
    yield "depthwise, past all sides", partial(run_convolution, (3, 5, 4, 4), 5, (7, 7), (1, 1), "")
    yield "depthwise, strips of 7", partial(run_convolution, (16, 100, 29, 30), 100, (7, 7), (1, 1), "gelu")
    yield "depthwise, strips of 4", partial(run_convolution, (8, 100, 57, 55), 100, (5, 5), (2, 2), "hardswish")
    yield "convolution, in slices", partial(run_convolution, (1, 264, 5, 7), 24, (3, 3), (1, 1), "relu")
    yield "convolution, in large blocks", partial(run_convolution, (2, 24, 57, 55), 72, (3, 2), (2, 1), "silu")
    yield "convolution, a product", partial(run_convolution, (1, 520, 7, 7), 136, (1, 1), (1, 1), "")
    yield "max-pool, several blocks of channels", partial(run_max_pool, (1, 65, 13, 12), FP16, (5, 4), (3, 2), (2, 1))
    yield "max-pool, past both sides", partial(run_max_pool, (3, 5, 7, 7), FP32, 7, 7, 3)
    yield "max-pool, of a stem", partial(run_max_pool, (2, 64, 15, 17), BF16, 3, 2, 1)


def run_all(chosen: Sequence[tuple[str, Callable[[], None]]]) -> int:
    """Run cases, all of them whatever fails, and return how many have failed."""
    failed = 0
    for name, run in chosen:
        try:
            run()
        except Exception as error:
            failed += 1
            if failed == 1:
                traceback.print_exc()
            print(f"failed: {name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
    return failed


def main() -> int:
    """Run a part of the cases."""
    import triton

    part, parts = int(sys.argv[1]), int(sys.argv[2])
    launched: Counter[str] = Counter()
    triton.knobs.runtime.launch_enter_hook.add(lambda launch: launched.update([launch.get()["name"]]))
    failed = run_all(list(cases())[part::parts])
    torch.cuda.synchronize()
    print("launched:", ", ".join(f"{name} {count}" for name, count in sorted(launched.items())), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
