"""fused_head_reference.py: the dtype that the reference computes in."""

import pytest
import torch
from auxhead.kernels.reference.fused_head import fused_head_reference, softmax_of
from support.head_cases import DTYPES, exact_logits, make_head


@pytest.mark.parametrize(("pool", "size"), [("avg", (2, 2)), ("max", (1, 1)), ("none", (1, 1))])
def test_float64_is_computed_in_float64(pool, size):
    """Tests of the kernel measure its errors against this: float32 within would hide errors of that size."""
    head = make_head((4, 3, 6, 5), 7, pool=pool, pool_size=size, dtype=torch.float64)
    out = fused_head_reference(*head, pool=pool, pool_size=size, temperature=1.3, threshold=0.5)
    wanted = (exact_logits(*head, pool=pool, pool_size=size) / 1.3).softmax(-1)
    assert out.probs.dtype == out.confidence.dtype == torch.float64
    torch.testing.assert_close(out.probs, wanted, rtol=1e-13, atol=0.0)
    assert torch.equal(softmax_of(wanted, 1.0).probs, wanted.softmax(-1))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_narrower_dtypes_are_computed_in_float32(dtype):
    """Sums included, of which half precision would lose what single precision keeps."""
    x, weight, bias = make_head((4, 300, 6, 5), 7, dtype=dtype)
    options = {"pool": "avg", "pool_size": (1, 1), "temperature": 1.0, "threshold": 0.5}
    out = fused_head_reference(x, weight, bias, **options)
    exact = fused_head_reference(x.double(), weight.double(), bias.double(), **options)
    assert out.probs.dtype == torch.float32
    torch.testing.assert_close(out.probs.double(), exact.probs, rtol=1e-5, atol=1e-7)
