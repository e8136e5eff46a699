"""convolution.py: as exact as PyTorch's convolution, sum and activation, in one launch."""

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels import compiled_for, convolution, fused_conv2d, fused_conv2d_operator, takes_convolution
from auxhead.kernels.reference.convolution import FOLLOWING, convolution_reference
from hypothesis import given
from hypothesis import strategies as st
from support.counted_launches import counted_launches

LAST = torch.channels_last
HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]
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
#: The same, and then as many outputs, and True with an addend.
DENSE_CASES = [
    (2, 32, 14, 14, (3, 3), (1, 1), (1, 1), (1, 1), True, 48, False),
    (1, 72, 9, 9, (5, 5), (2, 2), (2, 2), (1, 1), True, 16, True),
    (3, 8, 11, 7, (3, 3), (2, 1), (0, 1), (1, 1), False, 136, True),
    (1, 264, 7, 7, (1, 1), (1, 1), (0, 0), (1, 1), True, 24, True),  # a product
    (2, 520, 5, 6, (1, 1), (1, 1), (0, 0), (1, 1), False, 8, False),
    (1, 64, 8, 8, (1, 1), (2, 2), (0, 0), (1, 1), True, 64, False),
    (1, 16, 6, 6, (1, 1), (1, 1), (1, 1), (1, 1), True, 16, False),  # padded
    (2, 40, 12, 9, (3, 2), (1, 2), (2, 0), (2, 3), True, 72, True),
    (1, 8, 1, 1, (3, 3), (1, 1), (1, 1), (1, 1), False, 8, False),
    (1, 8, 6, 8, (1, 3), (1, 1), (0, 4), (1, 1), False, 8, True),
]


@pytest.fixture
def launches(monkeypatch):
    """Grids of launches of either kernel."""
    return counted_launches(monkeypatch, "depthwise", "convolution", of="convolution")


@pytest.fixture(params=[None, *range(len(convolution._BLOCKS))], ids=lambda number: f"block {number}")
def any_block(request, monkeypatch):
    """Programs by the rule, and of each size there is."""
    if request.param is not None:
        monkeypatch.setattr(convolution, "_BLOCKS", convolution._BLOCKS[request.param :][:1])


def layer(case, dtype, device):
    """A map, a weight, a bias or None, and sizes; of a dense convolution also an addend or None."""
    *shape, window, stride, padding, dilation, biased = case[:9]
    outputs, channels = (shape[1], 1) if len(case) == 9 else (case[9], shape[1])
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=LAST)
    weight = torch.randn(outputs, channels, *window, device=device).to(dtype)
    bias, sizes = torch.randn(outputs, device=device).to(dtype) if biased else None, (stride, padding, dilation)
    if len(case) == 9:
        return x, weight, bias, sizes
    weight = weight.contiguous(memory_format=LAST)
    addend = torch.randn_like(convolution_reference(x, weight, bias, sizes)) if case[10] else None
    return x, weight, bias, sizes, addend


def assert_exact(found, x, weight, bias, sizes, following, addend=None) -> None:
    """Off by at most twice what PyTorch is, of sums of products in float64."""
    wide = [None if each is None else each.double() for each in (x, weight, bias, addend)]
    truth = convolution_reference(*wide[:3], sizes, following, wide[3])
    theirs = convolution_reference(x, weight, bias, sizes, following, addend)
    assert found.dtype == x.dtype and found.shape == truth.shape and found.is_contiguous(memory_format=LAST)
    allowed = 2 * (theirs.double() - truth).abs().max() + torch.finfo(x.dtype).eps * truth.abs().max()
    assert (found.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_depthwise_is_as_exact_as_pytorchs(device, launches, poisoned_empty, case, following) -> None:
    dtype = DTYPES[(CASES.index(case) + list(FOLLOWING).index(following)) % 3]
    x, weight, bias, sizes = layer(case, dtype, device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = fused_conv2d(x, weight, bias, sizes, following)
        assert len(launches) == (device.type == "cuda" or not torch.cuda.is_available())
        assert_exact(found, x, weight, bias, sizes, following)
    assert torch.equal(found, fused_conv2d(x, weight, bias, sizes, following))
    assert torch.equal(found, fused_conv2d_operator(x, weight, bias, *map(list, sizes), following, None))


@pytest.mark.parametrize("case", DENSE_CASES, ids=str)
def test_dense_is_as_exact_as_pytorchs(device, launches, poisoned_empty, any_block, case) -> None:
    number = DENSE_CASES.index(case)
    dtype, following = HALVES[number % 2], list(FOLLOWING)[number % 5]
    x, weight, bias, sizes, addend = layer(case, dtype, device)
    found = fused_conv2d(x, weight, bias, sizes, following, addend)
    assert len(launches) == (device.type == "cuda" or not torch.cuda.is_available())
    assert_exact(found, x, weight, bias, sizes, following, addend)
    assert torch.equal(found, fused_conv2d(x, weight, bias, sizes, following, addend))
    assert torch.equal(found, fused_conv2d_operator(x, weight, bias, *map(list, sizes), following, addend))


def test_programs_are_as_small_as_a_small_map_wants() -> None:
    """What was measured soonest: of few positions small programs in slices, of many large ones."""

    def block(samples: int, channels: int, size: int, outputs: int, window: int) -> tuple[int, int]:
        x, weight = torch.empty(samples, channels, size, size), torch.empty(outputs, channels, window, window)
        constants = convolution._constants(x, weight, ((1, 1), (window // 2,) * 2, (1, 1)), "")
        return constants["BLOCK_P"], constants["SLICES"]

    assert block(1, 128, 14, 32, 3) == block(1, 512, 7, 512, 3) == (16, 4)
    assert block(1, 64, 56, 64, 3)[1] == 1 and block(32, 128, 28, 256, 1)[0] >= 64


def test_what_is_compiled_for_is_all_that_a_launch_has(device, monkeypatch) -> None:
    """Equal for others of the same kind, so that it is compiled once, and different where constants are."""
    layers = [layer(case, torch.float16, device) for case in (*DENSE_CASES, *CASES)]
    by_kind: dict = {}
    for x, weight, bias, sizes, *addend in layers:
        kind = compiled_for(x, weight, bias, sizes, "relu", *addend)
        constants = convolution._constants(x, weight, sizes, "relu")
        window = None if weight.shape[1] > 1 or x.shape[1] == 1 else weight.shape[2:]
        by_kind.setdefault(kind, []).append((constants, bias is None, bool(addend) and addend[0] is None, window))
    assert all(each == its[0] for its in by_kind.values() for each in its)
    x, weight, bias, sizes, addend = layers[0]
    one = compiled_for(x, weight, bias, sizes, "relu", addend)
    assert one == compiled_for(x.clone(), weight, bias * 2, sizes, "relu", addend)
    assert one not in (compiled_for(x, weight, None, sizes, "relu"), compiled_for(x, weight, bias, sizes, "silu"))


@pytest.mark.parametrize("memory_format", [LAST, torch.contiguous_format], ids=str)
def test_the_operators_output_lies_as_compilers_are_told(device, memory_format) -> None:
    x, weight, bias, sizes = layer(CASES[0], torch.float32, device)
    given = x.contiguous(memory_format=memory_format), weight, bias, *map(list, sizes), "relu", None
    torch.library.opcheck(fused_conv2d_operator, given, test_utils="test_faketensor")
    assert fused_conv2d_operator(*given).is_contiguous(memory_format=LAST)


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
        assert_exact(fused_conv2d(*given, following), *given, following)


@given(data=st.data())
def test_any_sizes_of_dense_ones(device, data) -> None:
    n, c, outputs, h, w = (data.draw(st.integers(1, most)) for most in (3, 20, 20, 9, 9))
    window, stride, dilation = (data.draw(st.tuples(st.integers(1, most), st.integers(1, most))) for most in (4, 3, 2))
    reach = [gap * (size - 1) for gap, size in zip(dilation, window, strict=True)]
    padding = tuple(
        max(0, each + 1 - size) + data.draw(st.integers(0, 3)) for each, size in zip(reach, (h, w), strict=True)
    )
    dtype, following = data.draw(st.sampled_from(HALVES)), data.draw(st.sampled_from(list(FOLLOWING)))
    biased, added = data.draw(st.booleans()), data.draw(st.booleans())
    case = (n, 8 * c, h, w, window, stride, padding, dilation, biased, 8 * outputs, added)
    x, weight, bias, sizes, addend = layer(case, dtype, device)
    assert_exact(fused_conv2d(x, weight, bias, sizes, following, addend), x, weight, bias, sizes, following, addend)


def test_odd_numbers_stay_odd(device) -> None:
    x, weight, bias, sizes = layer(CASES[0], torch.float32, device)
    x[0, 0, 5, 5], x[0, 1, 5, 5] = float("nan"), float("inf")
    for following in FOLLOWING:
        found = fused_conv2d(x, weight, bias, sizes, following)
        wanted = convolution_reference(x, weight, bias, sizes, following)
        assert torch.equal(found.isnan(), wanted.isnan()) and found[0, 0, 5, 5].isnan(), following


@pytest.mark.parametrize(
    "odd",
    ["contiguous", "gradient", "double", "two of each channel", "large window", "negated", "empty", "many products"],
)
def test_all_others_are_pytorchs(device, launches, monkeypatch, odd) -> None:
    x, weight, bias, sizes = layer(CASES[0], torch.float32, device)
    if odd == "many products":
        monkeypatch.setattr(convolution, "MOST_PRODUCTS", x.numel() * 9 - 1)
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
    else:
        x = x[:0]
    found = fused_conv2d(x, weight, bias, sizes, "relu")
    assert torch.equal(found, F.relu(F.conv2d(x, weight, bias, *sizes, 32)))
    assert found.requires_grad == (odd == "gradient") and not launches


@pytest.mark.parametrize(
    "odd", ["contiguous", "contiguous weight", "gradient", "float32", "channels", "outputs", "groups", "broadcast"]
)
def test_all_other_dense_ones_are_pytorchs(device, launches, odd) -> None:
    x, weight, bias, sizes, addend = layer(DENSE_CASES[1], torch.float16, device)
    groups = 1
    if odd == "contiguous":
        x = x.contiguous()
    elif odd == "contiguous weight":
        weight = weight.contiguous()
    elif odd == "gradient":
        weight.requires_grad_()
    elif odd == "float32":
        x, weight, bias, addend = x.float(), weight.float(), bias.float(), addend.float()
    elif odd == "channels":
        x, weight = x[:, :70].contiguous(memory_format=LAST), weight[:, :70].contiguous(memory_format=LAST)
    elif odd == "outputs":
        weight, bias = weight[:14], bias[:14]
        addend = addend[:, :14].contiguous(memory_format=LAST)
    elif odd == "groups":
        weight, groups = weight[:, :36].contiguous(memory_format=LAST), 2
    else:
        addend = addend[..., :1]
    assert not takes_convolution(x, weight, sizes, addend)
    found = fused_conv2d(x, weight, bias, sizes, "relu", addend)
    assert torch.equal(found, F.relu(F.conv2d(x, weight, bias, *sizes, groups) + addend)) and not launches
    assert found.requires_grad == (odd == "gradient")


def test_an_exported_program_calls_the_operator(device, launches) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return fused_conv2d(x, weight, None, ((1, 1), (1, 1), (1, 1)), "silu")

    x, weight, *_ = layer(CASES[0], torch.float16, device)
    program = torch.export.export(Layer(), (x, weight))
    assert not launches and any("fused_conv2d" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x, weight), Layer()(x, weight))
