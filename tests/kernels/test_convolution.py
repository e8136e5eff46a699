"""convolution.py: as exact as PyTorch's convolution, sum and activation, in one launch."""

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels import convolution, fused_conv2d
from auxhead.kernels.convolution import compiled_for, fused_conv2d_operator
from auxhead.kernels.reference.convolution import FOLLOWING, convolution_reference
from hypothesis import given
from hypothesis import strategies as st
from support.convolution_layers import CASES, DENSE_CASES, LAST, in_rows, layer
from support.counted_launches import counted_launches

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]
#: Rows of a depthwise strip.
HEIGHTS = [1, *convolution._ROWS]


@pytest.fixture
def launches(monkeypatch):
    """Grids of launches of either kernel."""
    return counted_launches(monkeypatch, "depthwise", "convolution", of="convolution")


@pytest.fixture(params=[None, *range(len(convolution._BLOCKS))], ids=lambda number: f"block {number}")
def any_block(request, monkeypatch):
    """Programs by the rule, and of each size there is."""
    if request.param is not None:
        monkeypatch.setattr(convolution, "_BLOCKS", convolution._BLOCKS[request.param :][:1])


def force_rows(monkeypatch, rows: int) -> None:
    """Let depthwise programs take strips of so many rows."""
    for name, forced in (("_ROWS", (rows,)), ("_LEAST_PROGRAMS", 0), ("_MOST_ROWS_READ", 99)):
        monkeypatch.setattr(convolution, name, forced)


def by_operator(given, *others):
    x, weight, bias, sizes, groups = given
    return fused_conv2d_operator(x, weight, bias, *map(list, sizes), groups, *others, True)


def assert_exact(found, given, following, addend=None) -> None:
    """Off by at most twice what PyTorch is, of sums of products in float64."""
    x, weight, bias, sizes, groups = given
    wide = [None if each is None else each.double() for each in (x, weight, bias, addend)]
    truth = convolution_reference(*wide[:3], sizes, groups, following, wide[3])
    theirs = convolution_reference(*given, following, addend)
    assert found.dtype == x.dtype and found.shape == truth.shape and found.is_contiguous(memory_format=LAST)
    allowed = 2 * (theirs.double() - truth).abs().max() + torch.finfo(x.dtype).eps * truth.abs().max()
    assert (found.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_depthwise_is_as_exact_as_pytorchs(device, launches, poisoned_empty, monkeypatch, case, following) -> None:
    """Each case in strips of each height, by the rule or forced, and in each dtype."""
    number = CASES.index(case) + list(FOLLOWING).index(following)
    dtype, rows = DTYPES[number % 3], [None, *HEIGHTS][number % 5]
    if rows is not None:
        force_rows(monkeypatch, rows)
    given, _ = layer(case, dtype, device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found = fused_conv2d(*given, following)
        assert len(launches) == (device.type == "cuda" or not torch.cuda.is_available())
        assert_exact(found, given, following)
    assert torch.equal(found, fused_conv2d(*given, following))
    assert torch.equal(found, by_operator(given, following, None))


@pytest.mark.parametrize("case", DENSE_CASES, ids=str)
def test_dense_is_as_exact_as_pytorchs(device, launches, poisoned_empty, any_block, case) -> None:
    number = DENSE_CASES.index(case)
    dtype, following = HALVES[number % 2], list(FOLLOWING)[number % len(FOLLOWING)]
    given, addend = layer(case, dtype, device)
    found = fused_conv2d(*given, following, addend)
    assert len(launches) == (device.type == "cuda" or not torch.cuda.is_available())
    assert_exact(found, given, following, addend)
    assert torch.equal(found, fused_conv2d(*given, following, addend))
    assert torch.equal(found, by_operator(given, following, addend))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_depthwise_factors_may_be_of_float32(device, launches, poisoned_empty, case, dtype) -> None:
    """What they make is rounded once, and an exported program makes the same."""
    (x, weight, bias, sizes, groups), _ = layer(case, dtype, device)
    weight, bias = weight.float() * 1.001, None if bias is None else bias.float() * 1.001
    found = fused_conv2d(x, weight, bias, sizes, groups, "relu")
    assert len(launches) == 1 and found.dtype == dtype
    exact = F.relu(F.conv2d(*(None if each is None else each.double() for each in (x, weight, bias)), *sizes, groups))
    assert (found.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
    assert torch.equal(by_operator((x, weight, bias, sizes, groups), "relu", None), found)
    torch.testing.assert_close(convolution_reference(x, weight, bias, sizes, groups, "relu"), found)
    kinds = [compiled_for(x, each, None, sizes, groups) for each in (weight, weight.to(dtype))]
    assert kinds[0] != kinds[1]


@pytest.mark.parametrize("case", [*CASES, *DENSE_CASES])
@pytest.mark.parametrize("first", [0, 8, 5])
def test_maps_may_be_some_channels_of_wider_ones(device, launches, case, first: int) -> None:
    """Read and written in place; what lies beside is neither read nor written."""
    dtype = HALVES[0] if len(case) > 9 else DTYPES[0]
    given, addend = layer(case, dtype, device)
    x, *others = given
    expected = fused_conv2d(*given, "relu", addend)
    outputs = expected.shape[1]
    wide_x, out = in_rows(x, first, 16 * (x.shape[1] // 8 + 2)), in_rows(torch.zeros_like(expected), 16, outputs + 48)
    wide_out = out.as_strided((len(out), outputs + 48, *out.shape[2:]), out.stride(), 0)
    launches.clear()
    found = fused_conv2d(wide_x, *others, "relu", addend, out)
    assert found is out and len(launches) == 1
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    if first == 0:
        assert torch.equal(out, expected)
    assert wide_out[:, :16].isnan().all() and wide_out[:, 16 + outputs :].isnan().all()
    assert torch.equal(fused_conv2d(wide_x, *others, "relu", addend), out)


def test_programs_are_as_small_as_a_small_map_wants() -> None:
    """What was measured soonest: of few positions small programs in slices, of many large ones."""

    def block(samples: int, channels: int, size: int, outputs: int, window: int) -> tuple[int, int]:
        x, weight = torch.empty(samples, channels, size, size), torch.empty(outputs, channels, window, window)
        constants = convolution._constants(x, weight, ((1, 1), (window // 2,) * 2, (1, 1)), 1, "")
        return constants["BLOCK_P"], constants["SLICES"]

    assert block(1, 128, 14, 32, 3) == block(1, 512, 7, 512, 3) == (16, 4)
    assert block(1, 64, 56, 64, 3)[1] == 1 and block(32, 128, 28, 256, 1)[0] >= 64


def test_strips_are_as_high_as_leaves_enough_programs() -> None:
    """What was measured soonest: one row of few positions, seven of many, four where a stride would read too many."""

    def rows(samples: int, channels: int, size: int, window: int, stride: int = 1, dilation: int = 1) -> int:
        x, weight = torch.empty(samples, channels, size, size, device="meta"), torch.empty(channels, 1, window, window)
        sizes = (stride,) * 2, (window // 2 * dilation,) * 2, (dilation,) * 2
        return convolution._constants(x, weight, sizes, channels, "")["ROWS"]

    assert rows(1, 384, 14, 7) == rows(1, 120, 28, 5) == rows(8, 184, 14, 3) == rows(1, 64, 112, 3, 2) == 1
    assert rows(32, 96, 56, 7) == rows(8, 192, 28, 7) == rows(32, 768, 7, 7) == 7
    assert rows(32, 144, 56, 5, 2) == rows(8, 144, 56, 5, 2) == 4
    assert rows(32, 96, 56, 7, dilation=7) == 1, "windows of neighbours share no row"


def test_what_is_compiled_for_is_all_that_a_launch_has(device) -> None:
    """Equal for others of the same kind, so that it is compiled once, and different where constants are."""
    by_kind: dict = {}
    for case in (*DENSE_CASES, *CASES):
        (x, weight, bias, sizes, groups), addend = layer(case, torch.float16, device)
        constants = convolution._constants(x, weight, sizes, groups, "relu")
        lines = (weight.shape[2:], sizes[0][0], sizes[2][0]) if weight.shape[1] == 1 else None
        launch = constants, bias is None, addend is None, lines
        by_kind.setdefault(compiled_for(x, weight, bias, sizes, groups, "relu", addend), []).append(launch)
    assert all(each == its[0] for its in by_kind.values() for each in its)
    (x, weight, bias, sizes, _), addend = layer(DENSE_CASES[0], torch.float16, device)
    one = compiled_for(x, weight, bias, sizes, 1, "relu", addend)
    assert one == compiled_for(x.clone(), weight, bias * 2, sizes, 1, "relu", addend)
    others = (None, sizes, 1, "relu"), (bias, sizes, 1, "silu"), (bias, sizes, 1, "relu", x)
    assert one not in [compiled_for(x, weight, *other) for other in others]


@pytest.mark.parametrize("memory_format", [LAST, torch.contiguous_format], ids=str)
def test_the_operators_output_lies_as_compilers_are_told(device, memory_format) -> None:
    (x, weight, bias, sizes, groups), _ = layer(CASES[0], torch.float32, device)
    given = x.contiguous(memory_format=memory_format), weight, bias, *map(list, sizes), groups, "relu", None, True
    torch.library.opcheck(fused_conv2d_operator, given, test_utils="test_faketensor")
    assert fused_conv2d_operator(*given).is_contiguous(memory_format=LAST)


def test_what_compilers_are_told_holds_where_an_addend_is_larger(device) -> None:
    (x, weight, bias, sizes, groups), addend = layer(DENSE_CASES[1], torch.float16, device)
    given = x, weight, bias, *map(list, sizes), groups, "relu", torch.cat([addend, addend]), False
    torch.library.opcheck(fused_conv2d_operator, given, test_utils="test_faketensor")


@given(data=st.data())
def test_any_sizes(device, data) -> None:
    n, c, h, w = (data.draw(st.integers(1, most)) for most in (3, 70, 13, 13))
    window, stride, dilation = (data.draw(st.tuples(st.integers(1, most), st.integers(1, most))) for most in (5, 3, 2))
    reach = [gap * (size - 1) for gap, size in zip(dilation, window, strict=True)]
    padding = tuple(
        max(0, each + 1 - size) + data.draw(st.integers(0, 3)) for each, size in zip(reach, (h, w), strict=True)
    )
    dtype, following = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(list(FOLLOWING)))
    given, _ = layer((n, c, h, w, window, stride, padding, dilation, data.draw(st.booleans())), dtype, device)
    with pytest.MonkeyPatch.context() as patch, torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        force_rows(patch, data.draw(st.sampled_from(HEIGHTS)))
        assert_exact(fused_conv2d(*given, following), given, following)


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
    given, addend = layer(case, dtype, device)
    assert_exact(fused_conv2d(*given, following, addend), given, following, addend)


def test_odd_numbers_stay_odd(device) -> None:
    (x, *others), _ = layer(CASES[0], torch.float32, device)
    x[0, 0, 5, 5], x[0, 1, 5, 5] = float("nan"), float("inf")
    for following in FOLLOWING:
        found, wanted = fused_conv2d(x, *others, following), convolution_reference(x, *others, following)
        assert torch.equal(found.isnan(), wanted.isnan()) and found[0, 0, 5, 5].isnan(), following


def test_an_exported_program_calls_the_operator(device, launches) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return fused_conv2d(x, weight, None, ((1, 1), (1, 1), (1, 1)), len(weight), "silu")

    (x, weight, *_), _ = layer(CASES[0], torch.float16, device)
    program = torch.export.export(Layer(), (x, weight))
    assert not launches and any("fused_conv2d" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(x, weight), Layer()(x, weight))
