"""Heads with a ReLU, a norm or a hidden linear layer, in plain PyTorch, and a check that fused_head is as accurate."""

import torch
import torch.nn.functional as F
from auxhead.kernels import HiddenLayers, fused_head
from auxhead.kernels.reference.fused_head import pooled_features
from support.head_cases import assert_output_form, feature_count, make_input, make_linear
from support.tolerance import assert_as_accurate_as_pytorch
from torch import nn

#: Of all activations, as modules.
MODULES = {"relu": nn.ReLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), "hardswish": nn.Hardswish()}
#: Which layers there are: rectifies, a norm and whether it has parameters, hidden features.
LAYERS = {
    "relu": {"rectifies": True},
    "norm": {"norm": "affine"},
    "bare norm": {"norm": "bare"},
    "linear": {"width": 13, "bias": False},
    "relu, linear": {"rectifies": True, "width": 32},
    "norm, linear": {"norm": "affine", "width": 13},
    "all": {"rectifies": True, "norm": "affine", "width": 33},
}


def make(
    shape, classes, *, rectifies=False, norm=None, width=None, activation="gelu", bias=True,
    pool="avg", pool_size=1, dtype=torch.float32, device="cpu",
):  # fmt: skip
    """Return x, weight and bias of a head, and its hidden layers."""
    x = make_input(shape, dtype=dtype, device=device)
    features = feature_count(shape, pool, pool_size)
    hidden = HiddenLayers(rectifies)
    if norm is not None:
        hidden = hidden._replace(eps=1e-5)
    if norm == "affine":
        generator = torch.Generator().manual_seed(3)
        scale, shift = torch.randn(2, features, generator=generator).to(device, dtype)
        hidden = hidden._replace(norm_weight=scale, norm_bias=shift)
    if width is not None:
        first, offset = make_linear(features, width, dtype=dtype, device=device, bias=bias, seed=5)
        hidden = hidden._replace(weight=first, bias=offset, activation=activation)
    return x, *make_linear(width or features, classes, dtype=dtype, device=device, bias=bias), hidden


def chain(x, weight, bias, hidden, pool, pool_size):
    """Return the logits as people write the head, and the largest number on the way, in the dtype of x."""
    size = (pool_size, pool_size) if isinstance(pool_size, int) else pool_size
    numbers = pooled_features(F.relu(x) if hidden.rectifies else x, pool, size)
    largest = [numbers.abs().max()]
    if hidden.eps is not None:
        numbers = F.layer_norm(numbers, numbers.shape[1:], hidden.norm_weight, hidden.norm_bias, hidden.eps)
        largest.append(numbers.abs().max())
    if hidden.weight is not None:
        numbers = MODULES[hidden.activation](F.linear(numbers, hidden.weight, hidden.bias))
        largest.append(numbers.abs().max())
    logits = F.linear(numbers, weight, bias)
    return logits, max(float(one.detach()) for one in (*largest, logits.abs().max()))


def check(x, weight, bias, hidden, *, pool="avg", pool_size=1):
    """Run the head and assert that it is as accurate as PyTorch's modules; return its answer."""
    out = fused_head(x, weight, bias, pool=pool, pool_size=pool_size, threshold=0.5, hidden=hidden)
    assert_output_form(out, len(x), len(weight), x.device)
    offset = None if bias is None else bias.double()
    exact, magnitude = chain(x.double(), weight.double(), offset, hidden.to(torch.float64), pool, pool_size)
    probs, pytorch = exact.softmax(-1), chain(x, weight, bias, hidden, pool, pool_size)[0].softmax(-1)
    assert_as_accurate_as_pytorch(out.probs, probs, pytorch, magnitude=magnitude, what="probs")
    chosen = probs.gather(1, out.label[:, None])[:, 0]
    assert_as_accurate_as_pytorch(chosen, probs.amax(-1), pytorch.amax(-1), magnitude=magnitude, what="of the label")
    assert torch.equal(out.confidence, out.probs.amax(-1))
    assert torch.equal(out.exit, out.confidence > 0.5)
    return out
