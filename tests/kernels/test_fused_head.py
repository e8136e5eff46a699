"""fused_head.py, values: every rank, pool, size, dtype and number of classes, on both ways to multiply."""

import pytest
import torch
from auxhead.kernels import HeadOutput, fused_head
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_rule import config_by_rule
from hypothesis import given, settings
from hypothesis import strategies as st
from support.head_cases import DTYPES, check_head, feature_count, make_head, readable

pytestmark = pytest.mark.usefixtures("poisoned_empty", "tiles_from_7")

long = pytest.mark.long
MAPS = [
    (1, 1, 1, 1),
    (3, 5, 7, 9),
    (2, 5, 9, 7),
    (7, 5, 5, 3),
    pytest.param((2, 7, 13, 11), marks=long),
    pytest.param((17, 33, 5, 3), marks=long),
    pytest.param((33, 3, 4, 6), marks=long),
]
POOL_SIZES = [1, 2, 3, 5, 7, (2, 3), (4, 1)]


@pytest.mark.parametrize("samples", [6, 7])
def test_the_batches_of_these_tests_are_multiplied_in_both_ways(samples):
    view = head_view((samples, 5), (5, 1), "none", (1, 1))
    assert config_by_rule(HeadShape.of(view, 2, pool_max=False, dtype=torch.float16)).tiled == (samples == 7)


@pytest.mark.parametrize("pool", ["avg", "max", "none"])
@pytest.mark.parametrize("shape", MAPS, ids=readable)
def test_maps(shape, pool, device):
    for dtype in DTYPES.values():
        classes = 50 if shape[0] >= 7 else 10  # enough for groups of samples to pay
        check_head(*make_head(shape, classes, pool=pool, dtype=dtype, device=device), pool=pool)


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize(
    "shape", [(2, 3, 7, 9), (1, 2, 13, 11), (7, 3, 5, 3), pytest.param((16, 3, 5, 3), marks=long)], ids=readable
)
def test_pool_sizes(shape, pool, device):
    """Windows that divide the map, that overlap, and that are more than the map has elements."""
    for pool_size in POOL_SIZES:
        classes = 30 if shape[0] >= 7 else 6
        head = make_head(shape, classes, pool=pool, pool_size=pool_size, device=device)
        check_head(*head, pool=pool, pool_size=pool_size)


@pytest.mark.parametrize(
    "shape, pool_size",
    [
        ((2, 2, 1, 1), 7),
        ((1, 3, 2, 3), (5, 7)),
        ((7, 2, 1, 4), (3, 2)),
        pytest.param((16, 2, 1, 4), (3, 2), marks=long),
    ],
)
def test_pool_size_larger_than_the_map(shape, pool_size, device):
    for dtype in DTYPES.values():
        for pool in ("avg", "max"):
            head = make_head(shape, 5, pool=pool, pool_size=pool_size, dtype=dtype, device=device)
            check_head(*head, pool=pool, pool_size=pool_size)


@pytest.mark.parametrize("pool", ["avg", "max", "first", "none"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (2, 7, 33), (3, 12, 20), (7, 5, 9), pytest.param((17, 5, 9), marks=long)], ids=readable
)
def test_tokens(shape, pool, device):
    for dtype in DTYPES.values():
        check_head(*make_head(shape, 10, pool=pool, dtype=dtype, device=device), pool=pool)


@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (7, 17), pytest.param((33, 129), marks=long)], ids=readable)
def test_vectors_are_read_as_they_are(shape, device):
    for pool in ("avg", "max", "first", "none"):
        check_head(*make_head(shape, 10, pool=pool, device=device), pool=pool)


@pytest.mark.parametrize("samples", [1, 2, 7, 15, 16, 17, 33])
def test_batch_sizes(samples, device):
    """From 7 samples on, groups of 16 are multiplied by tl.dot."""
    for dtype in DTYPES.values():
        for classes in (2, 10) if device.type == "cuda" or samples < 15 else (10,):
            check_head(*make_head((samples, 21), classes, dtype=dtype, device=device))


@pytest.mark.parametrize("classes", [2, 3, 10, 17, 257, 1000, 1025, 2049])
@pytest.mark.parametrize("samples", [2, 7, pytest.param(17, marks=long)])
def test_numbers_of_classes(classes, samples, device):
    """Up to several blocks of classes in the product and in the softmax."""
    check_head(*make_head((samples, 19), classes, device=device), threshold=0.01)


@pytest.mark.parametrize("samples", [1, pytest.param(16, marks=long)])
def test_32000_classes(samples, device):
    check_head(*make_head((samples, 16), 32000, dtype=torch.float16, device=device), threshold=0.001)


@pytest.mark.parametrize("samples", [2, 7, pytest.param(16, marks=long)])
def test_many_splits(samples, device):
    """More partial sums than the last program reads in one step; more features than a product takes in one."""
    for dtype in DTYPES.values():
        shape = (samples, {2: 10, 7: 3, 16: 20}[samples], 8, 8)
        check_head(*make_head(shape, 40, pool="none", dtype=dtype, device=device), pool="none")


def test_many_features(device):
    """A flattened map in the size class of ResNet-18's first block; there on a GPU, a third of it here."""
    shape = (1, 64, 56, 56) if device.type == "cuda" else (1, 67, 32, 31)
    check_head(*make_head(shape, 10, pool="none", dtype=torch.float16, device=device), pool="none")


def test_a_long_map_in_many_windows(device):
    """Window bounds are products of a position and a size, which here leave int32."""
    shape, pool_size = (1, 1, 1, 2**20), (1, 3000)
    x, weight, bias = make_head(shape, 2, pool_size=pool_size, device=device)
    x += torch.linspace(-1, 1, shape[-1], device=device)
    out = fused_head(x, weight, bias, pool_size=pool_size, threshold=0.5)
    # against the CPU: the products of PyTorch's own windows on a GPU leave int32, and it reads elsewhere
    out = HeadOutput(*(field.cpu() for field in out))
    check_head(x.cpu(), weight.cpu(), bias.cpu(), pool_size=pool_size, out=out)


@pytest.mark.parametrize("samples", [3, 7, pytest.param(17, marks=long)])
def test_without_bias(samples, device):
    check_head(*make_head((samples, 6, 5, 5), 10, bias=False, device=device), pool="avg")


@pytest.mark.parametrize("samples, classes", [(3, 10), (7, 10), (2, 1025), (7, 300), pytest.param(17, 300, marks=long)])
def test_without_probs(samples, classes, device):
    x, weight, bias = make_head((samples, 6, 5, 5), classes, device=device)
    out = check_head(x, weight, bias, return_probs=False)
    full = check_head(x, weight, bias)
    assert torch.equal(out.label, full.label) and torch.equal(out.confidence, full.confidence)


@pytest.mark.parametrize(
    "shape, pool", [((0, 3, 4, 5), "avg"), ((0, 3, 4, 5), "none"), ((0, 4, 6), "first"), ((0, 8), "avg")]
)
def test_no_samples(shape, pool, device):
    for return_probs in (True, False):
        x = torch.zeros(shape, device=device)
        weight = torch.ones(5, feature_count((1, *shape[1:]), pool), device=device)
        out = fused_head(x, weight, pool=pool, return_probs=return_probs)
        assert out.label.shape == out.confidence.shape == out.exit.shape == (0,)
        assert (out.label.dtype, out.confidence.dtype, out.exit.dtype) == (torch.int64, torch.float32, torch.bool)
        assert out.probs.shape == (0, 5) if return_probs else out.probs is None


@settings(max_examples=10)
@given(
    samples=st.sampled_from([1, 2, 7, 17]),
    channels=st.integers(1, 6),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    pool_size=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    pool=st.sampled_from(["avg", "max"]),
    classes=st.integers(2, 20),
    dtype=st.sampled_from(list(DTYPES.values())),
    seed=st.integers(0, 9),
)
def test_any_map(device, samples, channels, height, width, pool_size, pool, classes, dtype, seed):
    head = make_head(
        (samples, channels, height, width),
        classes,
        pool=pool,
        pool_size=pool_size,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    check_head(*head, pool=pool, pool_size=pool_size)
