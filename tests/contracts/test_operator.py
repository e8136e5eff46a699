"""torch.ops.auxhead.fused_head as PyTorch wants its operators: opcheck, gradcheck, gradgradcheck."""

import pytest
import torch
from auxhead.kernels import fused_head
from support.head_cases import DTYPES, make_head
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS
from torch import Tensor

#: Shape, pooling, layout, dtype; bias, rule tensors, probs, gradients: each value of each with some of the others.
CALLS = {
    "fp16, channels last": ((2, 4, 3, 3), {"pool": "max", "pool_size": (2, 1)}, "channels_last", "fp16", 1, 1, 1, 1),
    "bf16, expanded, no bias, no probs": ((2, 4, 3, 3), {}, "expanded_channels", "bf16", 0, 0, 0, 1),
    "overlapping, flattened": ((2, 2, 3, 3), {"pool": "none"}, "overlapping", "fp32", 1, 1, 0, 0),
    "tokens, transposed, no bias": ((2, 4, 5), {"pool": "avg"}, "transposed", "fp32", 0, 1, 1, 1),
    "bf16, first token of a slice": ((2, 4, 5), {"pool": "first"}, "without_class_token", "bf16", 1, 0, 1, 0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_opcheck_of_layouts_and_dtypes(call, device):
    shape, pooling, layout, dtype, with_bias, with_tensors, with_probs, trained = call
    _, weight, bias = make_head(shape, 3, dtype=DTYPES[dtype], device=device, bias=bool(with_bias), **pooling)
    layouts = MAP_LAYOUTS if len(shape) == 4 else TOKEN_LAYOUTS
    x = layouts[layout](lambda size: torch.randn(size, device=device, dtype=DTYPES[dtype]), *shape)
    tensors = [None if t is None else t.detach().requires_grad_(bool(trained)) for t in (x, weight, bias)]
    rule = [torch.tensor(value, device=device) if with_tensors else None for value in (1.5, 0.4)]
    size = pooling.get("pool_size", (1, 1))
    arguments = (*tensors, *rule, 1.5, 0.4, pooling.get("pool", "avg"), size, "max_prob", bool(with_probs))
    torch.library.opcheck(torch.ops.auxhead.fused_head.default, arguments)


POOLINGS = {"grid": ((1, 2, 3, 1), {"pool_size": (2, 1)}), "maxima of tokens": ((2, 2, 2), {"pool": "max"})}
#: A kernel that computes in float32 can be differentiated numerically by large steps alone: rounding by 1e-7 makes
#: 1e-5 of a step of 1e-2, and its curvature 1e-4; wrong derivatives are off by 1e-2.
STEPS = {"eps": 1e-2, "atol": 3e-3, "rtol": 1e-2, "check_undefined_grad": False}


@pytest.mark.filterwarnings("ignore:Input #. requires gradient and is not a double")
@pytest.mark.parametrize("shape, pooling", POOLINGS.values(), ids=POOLINGS)
def test_derivatives_are_those_of_what_the_kernel_answers(shape, pooling, device):
    x, weight, bias = (tensor.requires_grad_() for tensor in make_head(shape, 3, device=device, **pooling))
    heat = torch.tensor(1.5, device=device)

    def answers(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out = fused_head(x, weight, bias, temperature=heat, **pooling)
        return out.probs, out.confidence

    assert torch.autograd.gradcheck(answers, (x, weight, bias), **STEPS)
    if pooling.get("pool") != "max":  # whose steps may change which is the largest
        assert torch.autograd.gradgradcheck(answers, (x, weight, bias), fast_mode=True, **STEPS)
