"""cpu_head.py: the reference's answers bit for bit, in fewer operations."""

import math

import pytest
import torch
from auxhead.kernels import HeadOutput
from auxhead.kernels.reference.fused_head import fused_head_reference
from auxhead.kernels.repeat.head import cpu_head
from support.head_cases import DTYPES, assert_same_bits, check_head, make_head, readable
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS
from torch import Tensor

#: Inputs that a head may have, with their pools: shape, pool, pool_size.
INPUTS = [
    ((2, 3, 5, 4), "avg", (1, 1)),
    ((2, 3, 5, 4), "avg", (3, 2)),
    ((3, 5, 7, 9), "max", (1, 1)),
    ((3, 5, 7, 9), "max", (2, 3)),
    ((1, 4, 1, 3), "none", (1, 1)),
    ((2, 5, 9), "avg", (1, 1)),
    ((2, 5, 9), "max", (1, 1)),
    ((2, 5, 9), "first", (1, 1)),
    ((2, 5, 9), "none", (1, 1)),
    ((33, 65), "avg", (1, 1)),
]
#: What a rule's tensor may hold, though nobody can assign all of it.
TEMPERATURES = [1.0, 0.3, 1.7, 1e-30, 1e30, 1e-45, 0.0, -0.0, -1.0, -0.3, math.nan, math.inf, -math.inf]


def assert_as_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    pool: str = "avg",
    pool_size: tuple[int, int] = (1, 1),
    temperature: float = 1.0,
    threshold: float = 0.3,
) -> HeadOutput:
    """With probabilities and without; returns the answer with them."""
    heat, limit = torch.tensor(temperature), torch.tensor(threshold)
    before = [None if one is None else one.clone() for one in (x, weight, bias, heat, limit)]
    wanted = fused_head_reference(x, weight, bias, pool=pool, pool_size=pool_size, temperature=heat, threshold=limit)
    options = {"pool": pool, "pool_size": pool_size}
    found = cpu_head(x, weight, bias, heat, limit, return_probs=True, **options)
    assert_same_bits(found, wanted)
    assert_same_bits(cpu_head(x, weight, bias, heat, limit, return_probs=False, **options), wanted._replace(probs=None))
    for name, one, other in zip(HeadOutput._fields, found, wanted, strict=True):
        assert (one.dtype, one.stride(), one.requires_grad) == (other.dtype, other.stride(), False), name
    for one, other in zip(before, (x, weight, bias, heat, limit), strict=True):
        assert one is None or torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), "an input was written"
    return found


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape, pool, pool_size", INPUTS, ids=readable)
def test_all_inputs_in_all_dtypes(shape: tuple[int, ...], pool: str, pool_size: tuple[int, int], bias: bool) -> None:
    """As exact as PyTorch, too."""
    for temperature in (1.0, 0.7):
        for dtype in DTYPES.values():
            head = make_head(shape, 7, pool=pool, pool_size=pool_size, dtype=dtype, bias=bias)
            found = assert_as_reference(*head, pool=pool, pool_size=pool_size, temperature=temperature)
            limit = torch.tensor(0.3)
            check_head(*head, pool=pool, pool_size=pool_size, temperature=temperature, threshold=limit, out=found)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("layout", MAP_LAYOUTS.values(), ids=MAP_LAYOUTS)
def test_maps_of_any_layout(layout, dtype: torch.dtype) -> None:
    for pool, pool_size in (("avg", (1, 1)), ("max", (2, 3)), ("none", (1, 1))):
        _, weight, bias = make_head((2, 3, 5, 4), 11, pool=pool, pool_size=pool_size, dtype=dtype)
        x = layout(lambda shape: make_head(shape, 1, pool="none", dtype=dtype)[0], 2, 3, 5, 4)
        assert_as_reference(x, weight, bias, pool=pool, pool_size=pool_size, temperature=1.3)


@pytest.mark.parametrize("layout", TOKEN_LAYOUTS.values(), ids=TOKEN_LAYOUTS)
def test_tokens_of_any_layout(layout) -> None:
    for pool in ("avg", "max", "first", "none"):
        _, weight, bias = make_head((2, 5, 9), 11, pool=pool)
        x = layout(lambda shape: make_head(shape, 1, pool="none")[0], 2, 5, 9)
        assert_as_reference(x, weight, bias, pool=pool)


@pytest.mark.parametrize("classes", [1, 2, 3, 130, 1500])
def test_any_number_of_classes(classes: int) -> None:
    for samples in (1, 5):
        head = make_head((samples, 33), classes)
        for temperature in (1.0, 1.7):
            found = assert_as_reference(*head, temperature=temperature, threshold=0.05)
            check_head(*head, temperature=temperature, threshold=torch.tensor(0.05), out=found)


def test_any_temperature() -> None:
    for temperature in TEMPERATURES:
        found = assert_as_reference(*make_head((4, 9), 5), temperature=temperature, threshold=0.0)
        fine = 0 < temperature < math.inf
        assert found.exit.tolist() == [fine] * 4
        assert found.confidence.isnan().tolist() == [not fine] * 4


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0, -1.0, math.nan, math.inf, -math.inf])
def test_any_threshold(threshold: float) -> None:
    assert_as_reference(*make_head((6, 9), 5), threshold=threshold)


def test_a_confidence_that_is_the_threshold_is_not_sure() -> None:
    x, weight, bias = torch.zeros(2, 3), torch.zeros(4, 3), None
    assert assert_as_reference(x, weight, bias, threshold=0.25).exit.tolist() == [False, False]
    assert assert_as_reference(x, weight, bias, threshold=0.2499999).exit.tolist() == [True, True]


#: Logits of one sample.
ODD = {
    "NaN": [0.0, math.nan, 1.0, 2.0],
    "NaN first": [math.nan, 5.0, 1.0, 2.0],
    "NaN twice": [0.0, math.nan, math.nan, 2.0],
    "NaN behind inf": [0.0, math.inf, math.nan, 2.0],
    "all NaN": [math.nan] * 4,
    "inf": [0.0, 1.0, math.inf, 2.0],
    "inf twice": [0.0, math.inf, math.inf, 2.0],
    "all inf": [math.inf] * 4,
    "-inf": [-math.inf, 1.0, 0.5, -math.inf],
    "all -inf": [-math.inf] * 4,
    "both": [-math.inf, math.inf, 0.0, 1.0],
    "equals": [1.0, 3.0, 3.0, 3.0],
    "signed zeros": [-0.0, 0.0, -0.0, 0.0],
    "far apart": [3e38, -3e38, 0.0, 1.0],
    "large": [3e38, 3e38, 2.9e38, 0.0],
    "tiny": [1e-45, 2e-45, 0.0, -1e-45],
}


@pytest.mark.parametrize("logits", ODD.values(), ids=ODD)
def test_logits_that_are_not_finite_or_equal(logits: list[float]) -> None:
    """Alone, where the whole batch is odd, and beside samples that are not."""
    for temperature in (1.0, 0.5, 3.0, 1e-30, -1.0, 0.0, math.nan, math.inf):
        row = torch.tensor([logits])
        fine = torch.tensor([[0.3, 0.1, -2.0, 4.0]])
        for x in (row, torch.cat([fine, row, fine])):
            found = assert_as_reference(x, torch.zeros(4, 4), None)  # a product with 0 makes NaN of infinities
            assert found.label.min() >= 0
            # As biases they come to the logits as they are.
            assert_as_reference(torch.zeros(len(x), 2), torch.zeros(4, 2), row[0], temperature=temperature)
            assert_as_reference(x, torch.eye(4), None, temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=readable)
def test_logits_beyond_a_half_precision(dtype: torch.dtype) -> None:
    """They are float32, as the reference's."""
    x, weight = torch.full((2, 300), 60000.0).to(dtype), torch.full((3, 300), 1.0).to(dtype)
    weight[1] = 2
    found = assert_as_reference(x, weight, None)
    assert found.label.tolist() == [1, 1] and found.confidence.isfinite().all()


def test_weights_of_any_strides() -> None:
    x, weight, bias = make_head((4, 9), 5)
    assert_as_reference(x, weight.t().contiguous().t(), torch.stack([bias, bias], 1)[:, 0])
    assert_as_reference(x, torch._neg_view(weight), torch._neg_view(bias))
    assert_as_reference(x, weight[:1].expand(5, 9), bias[:1].expand(5))
