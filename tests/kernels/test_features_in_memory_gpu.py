"""jit/read_product.py on a GPU: features that lie in memory before tensor cores multiply them, packed or in place."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from auxhead.kernels import LaunchConfig, fused_head
from support.head_cases import (
    DTYPES,
    assert_same_bits,
    check_head,
    check_in_turn,
    feature_count,
    head_logits,
    launched_as,
    make_input,
    make_linear,
)
from support.hidden_layer_cases import check, make
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
PACKED = LaunchConfig(16, 16, 8, 16, 64, 64, 4, 1024, 1, 1, 8, weight_buffers=3, features="packed")
IN_PLACE = replace(PACKED, block_p=16, block_a=1, block_c=8, block_f=128, features="in place")
VECTORS = replace(IN_PLACE, block_p=1, block_c=64, block_f=64, weight_buffers=5)
LARGE = replace(PACKED, block_n=64, block_k=128, block_f=32, block_s=1, weight_buffers=4)
#: By name: shape, layout, pool and its size, classes; configurations beside the rule's.
HEADS = {
    "vectors": ((33, 2048), None, "none", 1, 5000, (VECTORS, LARGE)),
    "one vector": ((1, 1280), None, "none", 1, 1000, (VECTORS,)),
    "70 vectors of 16 features": ((70, 16), None, "none", 1, 10, (VECTORS, replace(VECTORS, block_c=16, block_f=16))),
    "turned map, few classes": ((9, 512, 7, 7), "channels_last", "none", 1, 10, (IN_PLACE, PACKED)),
    "turned map, many classes": ((65, 64, 14, 14), "channels_last", "none", 1, 1000, (IN_PLACE, LARGE)),
    "turned map of odd sizes": ((17, 37, 9, 11), "channels_last", "none", 1, 77, (IN_PLACE, PACKED)),
    "map in rows": ((17, 37, 9, 11), "padded_rows", "none", 1, 77, (IN_PLACE, PACKED)),
    "every second element": ((9, 20, 5, 7), "steps", "none", 1, 130, (IN_PLACE, PACKED)),
    "pooled": ((20, 2048, 7, 7), "channels_last", "avg", 1, 3001, (PACKED, LARGE)),
    "windows": ((40, 128, 14, 10), "nchw", "max", (3, 4), 130, (PACKED, LARGE)),
    "windows of a channels-last map": ((9, 128, 14, 10), "channels_last", "avg", (3, 4), 130, (PACKED, LARGE)),
    "tokens": ((40, 50, 192), "without_class_token", "avg", 1, 1000, (PACKED, replace(PACKED, max_programs=20))),
}
every_head = pytest.mark.parametrize("name", HEADS)


def made(name, dtype, seed=0):
    """Return a head's x, weight and bias, and its pool."""
    shape, layout, pool, pool_size, classes, _ = HEADS[name]
    new = partial(make_input, dtype=dtype, device=DEVICE, seed=seed)
    x = new(shape) if layout is None else {3: TOKEN_LAYOUTS, 4: MAP_LAYOUTS}[len(shape)][layout](new, *shape)
    linear = make_linear(feature_count(shape, pool, pool_size), classes, dtype=dtype, device=DEVICE)
    return (x, *linear), {"pool": pool, "pool_size": pool_size}


def ways(name, x, weight, pool, pool_size):
    """Contexts in which a head is launched as the rule and as some configurations say."""
    size = (1, 1) if pool_size == 1 else pool_size
    return [nullcontext(), *(launched_as(config, x, len(weight), pool, size) for config in HEADS[name][-1])]


@every_head
def test_as_accurate_as_pytorch_and_the_same_bits_again(name):
    """Of float32 in three products on tensor cores, too."""
    for dtype in DTYPES.values():
        head, pooling = made(name, dtype)
        for way in ways(name, *head[:2], **pooling):
            with way:
                first = check_head(*head, **pooling)
                for _ in range(20):
                    assert_same_bits(first, fused_head(*head, threshold=0.5, **pooling))


@every_head
def test_with_a_norm_and_a_hidden_layer(name):
    """Some programs send what a norm needs, some have rows of the last layer, whatever the others do."""
    shape, _, pool, pool_size, classes, configs = HEADS[name]
    layers = {"rectifies": True, "norm": "affine", "width": 300}
    for dtype in DTYPES.values():
        (x, _, _), pooling = made(name, dtype)
        _, weight, bias, hidden = make(shape, classes, dtype=dtype, device=DEVICE, **layers, **pooling)
        size = (1, 1) if pool_size == 1 else pool_size
        for config, last_rows in zip(configs, (0, 64), strict=False):
            with launched_as(replace(config, last_rows=last_rows), x, 300, pool, size):
                first = check(x, weight, bias, hidden, **pooling)
                for _ in range(20):
                    assert_same_bits(first, fused_head(x, weight, bias, threshold=0.5, hidden=hidden, **pooling))


@every_head
def test_beside_other_work_and_each_other(name):
    """Inputs in turn: no launch takes the features of the one before, or those of another stream."""
    heads = [made(name, torch.float16, seed)[0] for seed in (0, 7)]
    pooling = made(name, torch.float16)[1]
    for way in ways(name, *heads[0][:2], **pooling):
        with way:
            check_in_turn(heads, partial(fused_head, **pooling), DEVICE)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@every_head
def test_what_is_not_finite_stays_in_its_sample(name, dtype):
    """Halves of float32 numbers that are not finite are NaN: they must not get into the sum."""
    (x, weight, bias), pooling = made(name, dtype)
    x, samples = x.clone(), len(x)
    for way in ways(name, x, weight, **pooling):
        with way:
            whole = fused_head(x, weight, bias, threshold=0.0, **pooling)
            broken = x.clone()
            for sample, value in ((1, float("nan")), (2, float("inf")), (4, -float("inf"))):
                broken[(min(sample, samples - 1), *(size // 2 for size in x.shape[1:]))] = value
            out = fused_head(broken, weight, bias, threshold=0.0, **pooling)
            logits = head_logits(broken.double(), weight.double(), bias.double(), **pooling)
            wrong = (logits.isnan() | (logits == float("inf"))).any(1)
            assert wrong.any() and not out.exit[wrong].any()
            assert out.probs[wrong].isnan().all() and out.confidence[wrong].isnan().all()
            assert_same_bits(type(out)(*(one[~wrong] for one in out)), type(out)(*(one[~wrong] for one in whole)))


def test_a_class_whose_weight_is_minus_infinity_has_no_probability():
    for name in ("vectors", "one vector"):
        for dtype in DTYPES.values():
            (x, weight, bias), pooling = made(name, dtype)
            x[:, 5].abs_().add_(0.1)
            weight[3, 5] = -float("inf")
            for way in ways(name, x, weight, **pooling):
                with way:
                    out = check_head(x, weight, bias, **pooling)
                assert (out.probs[:, 3] == 0).all()
