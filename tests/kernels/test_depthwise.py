"""depthwise.py: as exact as PyTorch's depthwise convolution and activation, in one launch."""

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels import depthwise, depthwise_conv2d
from auxhead.kernels.depthwise import depthwise_operator
from auxhead.kernels.reference.depthwise import FOLLOWING, depthwise_reference
from hypothesis import given
from hypothesis import strategies as st
from support.counted_launches import counted_launches

LAST = torch.channels_last
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
#: N, C, H, W, window, stride, padding, dilation, with a bias
CASES = [
    (2, 32, 14, 14, (3, 3), (1, 1), (1, 1), (1, 1), True),
    (1, 72, 9, 9, (5, 5), (2, 2), (2, 2), (1, 1), True),  # several blocks of channels
    (3, 5, 11, 7, (3, 3), (2, 1), (0, 1), (1, 1), False),
    (1, 96, 8, 8, (7, 7), (1, 1), (3, 3), (1, 1), True),  # ConvNeXt's
    (2, 3, 12, 9, (3, 2), (1, 2), (2, 0), (2, 3), True),
    (1, 65, 1, 1, (3, 3), (1, 1), (1, 1), (1, 1), True),
    (1, 1, 6, 8, (1, 3), (1, 1), (0, 4), (1, 1), False),  # windows wholly outside
]


@pytest.fixture
def launches(monkeypatch):
    """Which calls got as far as the kernel."""
    return counted_launches(monkeypatch, "depthwise")


def layer(case, dtype, device):
    """A map, a weight, a bias or None, and sizes."""
    *shape, window, stride, padding, dilation, biased = case
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=LAST)
    weight = torch.randn(shape[1], 1, *window, device=device).to(dtype)
    return x, weight, torch.randn(shape[1], device=device).to(dtype) if biased else None, (stride, padding, dilation)


def assert_exact(found, x, weight, bias, sizes, following) -> None:
    """Off by at most twice what PyTorch is, of sums of products in float64."""
    truth = depthwise_reference(x.double(), weight.double(), None if bias is None else bias.double(), sizes, following)
    theirs = depthwise_reference(x, weight, bias, sizes, following)
    assert found.dtype == x.dtype and found.shape == truth.shape and found.is_contiguous(memory_format=LAST)
    allowed = 2 * (theirs.double() - truth).abs().max() + torch.finfo(x.dtype).eps * truth.abs().max()
    assert (found.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_as_exact_as_pytorchs(device, launches, poisoned_empty, case, following) -> None:
    dtype = DTYPES[(CASES.index(case) + list(FOLLOWING).index(following)) % 3]
    x, weight, bias, sizes = layer(case, dtype, device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = depthwise_conv2d(x, weight, bias, sizes, following)
        assert len(launches) == (device.type == "cuda" or not torch.cuda.is_available())
        assert_exact(found, x, weight, bias, sizes, following)
    assert torch.equal(found, depthwise_conv2d(x, weight, bias, sizes, following))
    assert torch.equal(found, depthwise_operator(x, weight, bias, *map(list, sizes), following))


@pytest.mark.parametrize("memory_format", [LAST, torch.contiguous_format], ids=str)
def test_the_operators_output_lies_as_compilers_are_told(device, memory_format) -> None:
    x, weight, bias, sizes = layer(CASES[0], torch.float32, device)
    given = x.contiguous(memory_format=memory_format), weight, bias, *map(list, sizes), "relu"
    torch.library.opcheck(depthwise_operator, given, test_utils="test_faketensor")
    assert depthwise_operator(*given).is_contiguous(memory_format=LAST)


@given(data=st.data())
def test_any_sizes(device, data) -> None:
    n, c, h, w = (data.draw(st.integers(1, most)) for most in (3, 70, 13, 13))
    window, stride, dilation = (data.draw(st.tuples(st.integers(1, most), st.integers(1, most))) for most in (5, 3, 2))
    reach = [gap * (size - 1) for gap, size in zip(dilation, window, strict=True)]
    padding = tuple(
        max(0, each + 1 - size) + data.draw(st.integers(0, 3)) for each, size in zip(reach, (h, w), strict=True)
    )
    dtype, following = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(list(FOLLOWING)))
    given = layer((n, c, h, w, window, stride, padding, dilation, data.draw(st.booleans())), dtype, device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert_exact(depthwise_conv2d(*given, following), *given, following)


def test_odd_numbers_stay_odd(device) -> None:
    x, weight, bias, sizes = layer(CASES[0], torch.float32, device)
    x[0, 0, 5, 5], x[0, 1, 5, 5] = float("nan"), float("inf")
    for following in FOLLOWING:
        found = depthwise_conv2d(x, weight, bias, sizes, following)
        wanted = depthwise_reference(x, weight, bias, sizes, following)
        assert torch.equal(found.isnan(), wanted.isnan()) and found[0, 0, 5, 5].isnan(), following


@pytest.mark.parametrize(
    "odd", ["contiguous", "gradient", "double", "channels", "large window", "negated", "empty", "many products"]
)
def test_all_others_are_pytorchs(device, launches, monkeypatch, odd) -> None:
    x, weight, bias, sizes = layer(CASES[0], torch.float32, device)
    if odd == "many products":
        monkeypatch.setattr(depthwise, "MOST_PRODUCTS", x.numel() * 9 - 1)
    elif odd == "contiguous":
        x = x.contiguous()
    elif odd == "gradient":
        weight.requires_grad_()
    elif odd == "double":
        x, weight, bias = x.double(), weight.double(), bias.double()
    elif odd == "channels":
        weight, bias = torch.randn(64, 1, 3, 3, device=device), None
    elif odd == "large window":
        weight, sizes = torch.randn(32, 1, 8, 8, device=device), ((1, 1), (4, 4), (1, 1))
    elif odd == "negated":
        x = torch.complex(x, x).conj().imag
    else:
        x = x[:0]
    if odd == "channels":
        with pytest.raises(RuntimeError):
            depthwise_conv2d(x, weight, bias, sizes)
    else:
        found = depthwise_conv2d(x, weight, bias, sizes, "relu")
        assert torch.equal(found, F.relu(F.conv2d(x, weight, bias, *sizes, 32))) and found.requires_grad == (
            odd == "gradient"
        )
    assert not launches


def test_an_exported_program_calls_the_operator(device, launches) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return depthwise_conv2d(x, weight, None, ((1, 1), (1, 1), (1, 1)), "silu")

    x, weight, *_ = layer(CASES[0], torch.float16, device)
    program = torch.export.export(Layer(), (x, weight))
    assert not launches and any("depthwise_conv2d" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x, weight), Layer()(x, weight))
