"""convolution.py: what the kernels do not take is PyTorch's, and what that refuses is refused."""

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels import convolution, fused_conv2d, takes_convolution
from support.convolution_layers import CASES, DENSE_CASES, LAST, in_rows, layer
from support.counted_launches import counted_launches


@pytest.fixture
def launches(monkeypatch):
    """Grids of launches of either kernel."""
    return counted_launches(monkeypatch, "depthwise", "convolution", of="convolution")


@pytest.mark.parametrize("odd", ["rows of an odd number", "planes", "another order"])
def test_rows_that_the_kernel_does_not_take_are_pytorchs(device, launches, odd: str) -> None:
    (x, *others), addend = layer(DENSE_CASES[1], torch.float16, device)
    out = torch.empty_like(fused_conv2d(x, *others, "relu", addend))
    launches.clear()
    if odd == "rows of an odd number":
        x = in_rows(x, 0, x.shape[1] + 3)
    elif odd == "planes":
        out = out.contiguous()
    else:
        out = out.transpose(2, 3).contiguous(memory_format=LAST).transpose(2, 3)
    expected = F.relu(F.conv2d(x, others[0], others[1], *others[2], others[3]) + addend)
    assert fused_conv2d(x, *others, "relu", addend, out) is out and torch.equal(out, expected) and not launches


@pytest.mark.parametrize("odd", ["shape", "dtype"])
def test_what_does_not_fit_into_out_is_refused(device, launches, odd: str) -> None:
    (x, *others), _ = layer(DENSE_CASES[0], torch.float16, device)
    out = fused_conv2d(x, *others)
    launches.clear()
    out = torch.zeros_like(out[..., :1]) if odd == "shape" else torch.zeros_like(out).float()
    with pytest.raises(ValueError, match=r"out: got torch.float.* of shape .*, wants torch.float16 of shape"):
        fused_conv2d(x, *others, out=out)
    assert not launches and not out.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])  # the kernel's and PyTorch's
def test_a_following_that_there_is_not_is_refused_by_name(device, launches, dtype: torch.dtype) -> None:
    (x, *others), _ = layer(DENSE_CASES[0], dtype, device)
    with pytest.raises(ValueError, match=r"following: got 'tanh', wants one of \['', 'relu'"):
        fused_conv2d(x, *others, following="tanh")
    assert not launches


DEPTHWISE_ODD = [
    "contiguous", "gradient", "double", "two of each", "large window", "negated", "empty", "many outputs", "bias",
    "autocast",
]  # fmt: skip


@pytest.mark.parametrize("odd", DEPTHWISE_ODD)
def test_all_others_are_pytorchs(device, launches, monkeypatch, odd) -> None:
    (x, weight, bias, sizes, groups), _ = layer(CASES[0], torch.float32, device)
    if odd == "many outputs":
        monkeypatch.setattr(convolution, "MOST_POSITIONS", x.numel() + 1)
        sizes = (1, 1), (2, 2), (1, 1)
    elif odd == "contiguous":
        x = x.contiguous()
    elif odd == "gradient":
        weight.requires_grad_()
    elif odd == "double":
        x, weight, bias = x.double(), weight.double(), bias.double()
    elif odd == "two of each":
        weight, bias = torch.randn(64, 1, 3, 3, device=device), None
    elif odd == "large window":
        weight, sizes = torch.randn(32, 1, 8, 8, device=device), ((1, 1), (4, 4), (1, 1))
    elif odd == "negated":
        x = torch.complex(x, x).conj().imag
    elif odd == "bias":
        bias = torch.randn(64, device=device)[::2]
    elif odd == "empty":
        x = x[:0]
    with torch.autocast(device.type, torch.bfloat16, enabled=odd == "autocast"):
        found = fused_conv2d(x, weight, bias, sizes, groups, "relu")
        assert torch.equal(found, F.relu(F.conv2d(x, weight, bias, *sizes, groups)))
    assert found.requires_grad == (odd == "gradient") and not launches


#: x, weight, padding, dilation: int32 does not reach what is read, but for the padding, or the weight.
FAR = [
    ((1, 64, 8, 3_500_000), (64, 1, 7, 7), (200, 3), (1, 1)),
    ((1, 8, 1, 100_000_000), (8, 1, 7, 1), (3, 0), (1, 1)),
    ((1, 48_000_000, 1, 2), (48_000_000, 1, 7, 7), (3, 3), (1, 1)),
    ((1, 32, 4, 16), (32, 1, 3, 3), (2**22, 1), (2**22, 1)),
    ((1, 64, 8, 3_500_000), (64, 64, 3, 3), (200, 1), (1, 1)),
]


@pytest.mark.parametrize(("shape", "window", "padding", "dilation"), FAR)
def test_what_int32_does_not_reach_is_pytorchs(monkeypatch, shape, window, padding, dilation) -> None:
    monkeypatch.setattr(convolution, "runs_triton", lambda _x: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _kind: False)  # knows no device without memory
    groups = shape[1] // window[1]

    def takes(shape: tuple[int, ...], window: tuple[int, ...], *sizes: tuple[int, int]) -> bool:
        x, weight = (
            torch.empty(each, dtype=torch.float16, device="meta", memory_format=LAST) for each in (shape, window)
        )
        return takes_convolution(x, weight, None, ((1, 1), *sizes), min(groups, len(weight)))

    assert not takes(shape, window, padding, dilation)
    few = 8 if groups > 1 else shape[1]
    assert takes((1, few, *shape[2:3], 2), (few, *window[1:]), (window[2] // 2, window[3] // 2), (1, 1))


DENSE_ODD = [
    "contiguous", "contiguous weight", "gradient", "float32", "channels", "outputs", "groups", "broadcast",
    "gradient of the bias", "bias in steps", "negated bias", "wide addend",
]  # fmt: skip


@pytest.mark.parametrize("odd", DENSE_ODD)
def test_all_other_dense_ones_are_pytorchs(device, launches, odd) -> None:
    (x, weight, bias, sizes, groups), addend = layer(DENSE_CASES[1], torch.float16, device)
    if odd == "contiguous":
        x = x.contiguous()
    elif odd == "contiguous weight":
        weight = weight.contiguous()
    elif odd == "gradient":
        weight.requires_grad_()
    elif odd == "gradient of the bias":
        bias.requires_grad_()
    elif odd == "bias in steps":
        bias = torch.randn(32, device=device, dtype=x.dtype)[::2]
    elif odd == "negated bias":
        bias = torch._neg_view(bias)
    elif odd == "float32":
        x, weight, bias, addend = x.float(), weight.float(), bias.float(), addend.float()
    elif odd == "channels":
        x, weight = x[:, :70].contiguous(memory_format=LAST), weight[:, :70].contiguous(memory_format=LAST)
    elif odd == "outputs":
        weight, bias = weight[:14], bias[:14]
        addend = addend[:, :14].contiguous(memory_format=LAST)
    elif odd == "groups":
        weight, groups = weight[:, :36].contiguous(memory_format=LAST), 2
    elif odd == "wide addend":
        addend = addend.float()
    else:
        addend = addend[..., :1]
    assert not takes_convolution(x, weight, bias, sizes, groups, addend)
    found = fused_conv2d(x, weight, bias, sizes, groups, "relu", addend)
    assert torch.equal(found, F.relu(F.conv2d(x, weight, bias, *sizes, groups) + addend)) and not launches
    assert found.requires_grad == ("gradient" in odd)


@pytest.mark.parametrize("odd", ["channels", "bias", "dtype of the bias", "padding"])
def test_what_pytorch_refuses_is_refused(device, odd) -> None:
    (x, weight, bias, sizes, groups), _ = layer(DENSE_CASES[1], torch.float16, device)
    if odd == "channels":
        x = torch.cat([x, x], 1)
    elif odd == "bias":
        bias = bias[:4]
    elif odd == "dtype of the bias":
        bias = bias.double()
    else:
        sizes = sizes[0], (-1, -1), sizes[2]
    with pytest.raises(RuntimeError):
        fused_conv2d(x, weight, bias, sizes, groups)
