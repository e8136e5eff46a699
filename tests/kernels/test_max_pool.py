"""max_pool.py: the result is PyTorch's, bit for bit."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels import max_pool2d
from hypothesis import given
from hypothesis import strategies as st
from support.counted_launches import counted_launches
from torch.autograd import forward_ad
from torch.func import jvp, vmap

LAST = torch.channels_last
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: N, C, H, W, kernel, stride, padding
CASES = [
    (2, 64, 16, 16, 3, 2, 1),  # ResNet's stem
    (1, 192, 9, 9, 3, 1, 1),  # several blocks of channels
    (3, 5, 11, 7, 2, None, 0),
    (1, 1, 8, 8, 3, 2, 1),
    (2, 3, 5, 9, (1, 3), (2, 1), (0, 1)),
    (1, 7, 1, 1, 1, 1, 0),
    (2, 6, 8, 1, (3, 1), (1, 1), (1, 0)),
    (1, 65, 13, 12, (5, 4), (3, 2), (2, 1)),
    (1, 3, 7, 7, 7, 7, 3),  # windows that reach past the map on both sides
    (1, 4, 9, 9, 2, 5, 0),  # rows that no window reads
]


@pytest.fixture
def launches(monkeypatch):
    """Which calls got as far as the kernel."""
    return counted_launches(monkeypatch, "max_pool")


def runs_here(device: torch.device) -> bool:
    return device.type == "cuda" or not torch.cuda.is_available()


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    integers = {4: torch.int32, 2: torch.int16}[expected.element_size()]
    bits = [y.contiguous().view(integers)[~nan.contiguous()] for y in (actual, expected)]
    assert torch.equal(*bits)


def awkward_map(shape, dtype, device) -> torch.Tensor:
    """Few distinct values, so that equal ones meet: zeros of both signs, infinities and NaN among them."""
    x = torch.randint(-2, 3, shape, device=device).to(dtype) * 0.3
    x[torch.rand(shape, device=device) < 0.2] = -0.0
    for value in (float("nan"), float("inf"), float("-inf")):
        x[torch.rand(shape, device=device) < 0.05] = value
    return x.contiguous(memory_format=LAST)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_pytorch_s_bit_for_bit(device, launches, poisoned_empty, case) -> None:
    *shape, kernel_size, stride, padding = case
    dtype = DTYPES[CASES.index(case) % 3]
    x = awkward_map(shape, dtype, device)
    before = x.clone(memory_format=torch.preserve_format)
    actual = max_pool2d(x, kernel_size, stride, padding)
    assert len(launches) == (1 if runs_here(device) else 0)
    assert_bitwise(actual, F.max_pool2d(x, kernel_size, stride, padding))
    assert actual.is_contiguous(memory_format=LAST)
    assert torch.equal(x.nan_to_num(5.0), before.nan_to_num(5.0))


@given(data=st.data())
def test_any_shape(device, data) -> None:
    n, c, h, w = (data.draw(st.integers(1, most)) for most in (3, 70, 13, 13))
    kernel_size = tuple(data.draw(st.integers(1, min(5, size))) for size in (h, w))
    stride = data.draw(st.one_of(st.none(), st.tuples(st.integers(1, 4), st.integers(1, 4))))
    padding = tuple(data.draw(st.integers(0, size // 2)) for size in kernel_size)
    x = awkward_map((n, c, h, w), data.draw(st.sampled_from(DTYPES)), device)
    assert_bitwise(max_pool2d(x, kernel_size, stride, padding), F.max_pool2d(x, kernel_size, stride, padding))


def test_other_inputs_go_to_pytorch(device, launches) -> None:
    maps = torch.randn(2, 8, 6, 6, device=device)
    last = maps.contiguous(memory_format=LAST)
    for x in (maps, last[:, ::2], last[:, :, :, 1:], maps[0], last.double(), torch._neg_view(last)):
        assert torch.equal(max_pool2d(x, 2), F.max_pool2d(x, 2))
    wide = torch.randn(1, 2, 9, 9, device=device).contiguous(memory_format=LAST)
    assert torch.equal(max_pool2d(wide, 8, 1), F.max_pool2d(wide, 8, 1))
    assert not launches


def test_gradients_are_pytorch_s(device, launches) -> None:
    x = torch.randn(2, 8, 6, 6, device=device).contiguous(memory_format=LAST).requires_grad_()
    max_pool2d(x, 3, 2, 1).square().sum().backward()
    mine, x.grad = x.grad, None
    F.max_pool2d(x, 3, 2, 1).square().sum().backward()
    assert torch.equal(mine, x.grad) and not launches
    with torch.no_grad():
        assert torch.equal(max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1))
    assert len(launches) == (1 if runs_here(device) else 0)


def test_derivatives_of_other_kinds_are_pytorch_s(device, launches) -> None:
    """A kernel would drop a tangent without a word."""
    x, direction = (torch.randn(2, 8, 6, 6, device=device).contiguous(memory_format=LAST) for _ in range(2))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        found, wanted = (forward_ad.unpack_dual(pool(dual, 2)) for pool in (max_pool2d, F.max_pool2d))
    assert torch.equal(found.tangent, wanted.tangent)
    for transformed in (lambda pool: jvp(pool, (x,), (direction,))[1], lambda pool: vmap(pool)(x[None])):
        found, wanted = (transformed(lambda t, pool=pool: pool(t, 2)) for pool in (max_pool2d, F.max_pool2d))
        assert torch.equal(found, wanted)
    assert not launches


def test_more_positions_than_an_int32_counts_go_to_pytorch(device, launches, monkeypatch) -> None:
    x = torch.randn(2, 8, 6, 6, device=device).contiguous(memory_format=LAST)
    for most, runs in ((2 * 6 * 6, True), (2 * 6 * 6 - 1, False)):
        monkeypatch.setattr(importlib.import_module("auxhead.kernels.max_pool"), "MOST_POSITIONS", most)
        launches.clear()
        assert torch.equal(max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 3, 2, 1))
        assert len(launches) == (runs and runs_here(device))


@pytest.mark.parametrize("arguments", [(2, 1, 2), (0, 1, 0), (2, 0, 0), (9, 1, 0), (2, 1, -1), ((2, 2, 2), 1, 0)])
def test_what_pytorch_refuses_is_refused(device, arguments) -> None:
    x = torch.randn(1, 4, 6, 6, device=device).contiguous(memory_format=LAST)
    with pytest.raises(RuntimeError):
        F.max_pool2d(x, *arguments)
    with pytest.raises(RuntimeError):
        max_pool2d(x, *arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offsets_beyond_int32() -> None:
    x = torch.randn(1, 64, 33, 64, device="cuda", dtype=torch.float16).contiguous(memory_format=LAST)
    big = x.expand(17000, -1, -1, -1).contiguous(memory_format=LAST)  # 2.3e9 elements
    assert big.numel() > 2**31
    pooled = max_pool2d(big, 3, 2, 1)
    assert torch.equal(pooled[-1:], F.max_pool2d(x, 3, 2, 1))
    assert torch.equal(pooled[:1], pooled[-1:])
