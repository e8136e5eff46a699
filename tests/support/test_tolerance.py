"""tolerance.py: a correct result passes, small planted errors do not."""

import pytest
import torch
from auxhead.kernels import fused_head
from support.head_cases import DTYPES, check_head, make_head
from support.tolerance import FLOAT32_ULP, assert_as_accurate_as_pytorch

EXACT = torch.tensor([0.75, 0.125, 0.125], dtype=torch.float64)


@pytest.mark.parametrize("ulps, passes", [(0, True), (2, True), (6, False), (100, False)])
def test_floor_where_pytorch_is_exact_by_luck(ulps, passes):
    actual = EXACT.float()
    actual[0] += ulps * FLOAT32_ULP * 0.75
    if passes:
        assert_as_accurate_as_pytorch(actual, EXACT, EXACT.float())
    else:
        with pytest.raises(AssertionError, match="error"):
            assert_as_accurate_as_pytorch(actual, EXACT, EXACT.float())


@pytest.mark.parametrize("factor, passes", [(1.9, True), (2.1, False)])
def test_twice_the_error_of_pytorch(factor, passes):
    pytorch = EXACT + torch.tensor([1e-3, 0, 0], dtype=torch.float64)
    actual = EXACT + torch.tensor([0, 0, -1e-3 * factor], dtype=torch.float64)
    if passes:
        assert_as_accurate_as_pytorch(actual, EXACT, pytorch)
    else:
        with pytest.raises(AssertionError, match="twice PyTorch's"):
            assert_as_accurate_as_pytorch(actual, EXACT, pytorch)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_have_to_match(value):
    broken = EXACT.clone()
    broken[1] = value
    with pytest.raises(AssertionError, match="not finite"):
        assert_as_accurate_as_pytorch(broken, EXACT, EXACT)
    with pytest.raises(AssertionError, match="not finite"):
        assert_as_accurate_as_pytorch(EXACT, broken, EXACT)
    assert_as_accurate_as_pytorch(broken, broken, broken)
    other = broken.clone()
    other[1] = float("nan") if value == value else float("inf")
    with pytest.raises(AssertionError, match="NaN or Inf"):
        assert_as_accurate_as_pytorch(other, broken, broken)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("what", ["lost feature", "lost row", "lost bias", "shifted weight"])
def test_a_head_that_loses_something_is_caught(dtype, what):
    x, weight, bias = make_head((3, 64, 5, 7), 10, dtype=dtype)
    wrong_x, wrong_weight, wrong_bias = x.clone(), weight.clone(), bias.clone()
    if what == "lost feature":
        wrong_weight[:, -1] = 0
    elif what == "lost row":
        wrong_x[:, :, -1] = 0
    elif what == "lost bias":
        wrong_bias[-1] += 0.25
    else:
        wrong_weight = weight.roll(1, dims=1)
    out = fused_head(wrong_x, wrong_weight, wrong_bias, threshold=0.5)
    with pytest.raises(AssertionError, match="error"):
        check_head(x, weight, bias, out=out)
    check_head(wrong_x, wrong_weight, wrong_bias)


def test_poison_shows(poisoned_empty):
    assert torch.empty(3).isnan().all() and torch.zeros(3).new_empty(2, dtype=torch.float16).isnan().all()
    assert torch.empty(3, dtype=torch.int64).min() == torch.iinfo(torch.int64).max
    assert torch.zeros(1).new_empty(2, dtype=torch.bool).all()
