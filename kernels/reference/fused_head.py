"""The fused head and its gradients in plain PyTorch: what kernels are tested against, and what runs without Triton."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree

from .criteria import CRITERIA, Softmax, check_criterion
from .hidden_layers import NO_LAYERS, HiddenLayers


class HeadOutput(NamedTuple):
    """The answer of one head for N samples and K classes, on the device of its input; see :func:`fused_head`."""

    probs: Tensor | None
    """[N, K] float32; None where they are not wanted. Of float64 input it and the confidence are float64."""
    label: Tensor
    """[N] int64."""
    confidence: Tensor
    """[N] float32, by the criterion."""
    exit: Tensor
    """[N] bool: whether the confidence exceeds the threshold."""


# torch.export.save and AOTInductor refuse a NamedTuple without a name of its own
_pytree._register_namedtuple(HeadOutput, serialized_type_name="auxhead.kernels.HeadOutput")


def pooled_features(x: Tensor, pool: str, pool_size: tuple[int, int]) -> Tensor:
    """Pool and flatten the input of a head to [N, features], differentiably and in x's dtype.

    Arguments are those of :func:`auxhead.kernels.fused_head`.
    """
    if x.ndim == 2:
        return x
    if pool == "none":
        return x.flatten(1)
    if x.ndim == 3:  # [N, T, D]
        return {"avg": lambda: x.mean(1), "max": lambda: x.amax(1), "first": lambda: x[:, 0]}[pool]()
    return (F.adaptive_avg_pool2d if pool == "avg" else F.adaptive_max_pool2d)(x, pool_size).flatten(1)


def decide(
    logits: Tensor, temperature: Tensor | float, threshold: Tensor | float, criterion: str = "max_prob"
) -> HeadOutput:
    """Turn logits [N, K], of any float dtype, into a :class:`HeadOutput` under a criterion, in float32 or better.

    Divided is the distance from the largest logit, as the kernel's is: a logit divided by the temperature may overflow.
    Rules are as of :func:`fused_head`, which checks their numbers; here a temperature in a tensor gives NaN unless it
    is finite and greater than 0.

    Raises:
        ValueError: a criterion that there is not.
    """
    check_criterion(criterion)
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(())
        temperature = temperature.where((temperature > 0) & (temperature < torch.inf), torch.nan)
    limit = threshold.reshape(()) if isinstance(threshold, Tensor) else threshold
    # A NaN ranks as the largest logit, as it does for torch.argmax, so that a label is always a class index.
    label = logits.masked_fill(logits.isnan(), torch.inf).argmax(dim=-1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = logits.amax(dim=-1).detach()
    below = (logits - top[..., None]) / temperature
    softmax = Softmax(torch.softmax(below, dim=-1), below, top, temperature)
    confidence = CRITERIA[criterion].confidence(softmax)
    return HeadOutput(softmax.probs, label, confidence, confidence > limit)


def fused_head_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, pool: str, pool_size: tuple[int, int],
    temperature: Tensor | float, threshold: Tensor | float, criterion: str = "max_prob",
    hidden: HiddenLayers = NO_LAYERS,
) -> HeadOutput:  # fmt: skip
    """Pool -> flatten -> hidden layers -> linear -> softmax -> confidence check.

    Computed in float32, of float64 input in float64. Arguments are those of :func:`auxhead.kernels.fused_head`, which
    checks them; none is checked here.
    """
    return decide(logits_of(x, weight, bias, pool, pool_size, hidden), temperature, threshold, criterion)


def logits_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, pool: str, pool_size: tuple[int, int], hidden: HiddenLayers
) -> Tensor:
    """Return the logits [N, K] of a head, in float32 or better."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.dtype is not dtype:
        x, weight, hidden = x.to(dtype), weight.to(dtype), hidden.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    features = hidden.apply(pooled_features(F.relu(x) if hidden.rectifies else x, pool, pool_size))
    return F.linear(features, weight, bias)


def save_for_backward(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor | None]) -> None:
    """Save what :func:`backward` needs of a call of the operator ``auxhead::fused_head``, given its arguments."""
    x, weight, bias, heat, _, temperature, _, pool, pool_size, criterion, return_probs, *layers = inputs
    hidden = HiddenLayers(*layers)
    ctx.save_for_backward(x, weight, bias, heat, *(one for _, one in hidden.tensors()))
    # a context must not keep tensors in any other way
    without = hidden.with_tensors([None] * 4)
    ctx.options = (temperature, pool, tuple(pool_size), criterion, return_probs, without)
    ctx.mark_non_differentiable(output[1], output[3])
    ctx.set_materialize_grads(False)


def backward(
    ctx: Any, grad_probs: Tensor | None, _label: None, grad_confidence: Tensor | None, _exits: None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operator's arguments: differentiate the head in PyTorch.

    They are twice differentiable if a second derivative is.
    """
    twice = torch.is_grad_enabled()
    x, weight, bias, heat, *parameters = ctx.saved_tensors
    temperature, pool, pool_size, criterion, return_probs, without = ctx.options
    wanted = (*ctx.needs_input_grad, *[False] * 7)  # shorter if the call left arguments at their defaults
    needed = (*wanted[:3], *wanted[13:17])
    with torch.enable_grad():
        leaves: list[Any] = [  # if twice, aliases: what comes back may depend on the tensors, and they on one another
            one if one is None else one.view_as(one) if twice else one.detach().requires_grad_(need)
            for one, need in zip((x, weight, bias, *parameters), needed, strict=True)
        ]
        divisor = temperature if heat is None else heat
        output = fused_head_reference(
            *leaves[:3], pool=pool, pool_size=pool_size, temperature=divisor, threshold=1.0, criterion=criterion,
            hidden=without.with_tensors(leaves[3:]),
        )  # fmt: skip
        # terms of the loss to first order, so that one call differentiates through both outputs
        terms = [] if grad_confidence is None else [(output.confidence * grad_confidence).sum()]
        if return_probs and grad_probs is not None and output.probs is not None:
            terms.append((output.probs * grad_probs).sum())
    gradients: Sequence[Tensor] = ()
    if terms:
        of = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
        gradients = torch.autograd.grad(terms, of, [torch.ones_like(term) for term in terms], create_graph=twice)
    left = iter(gradients)
    grads = [next(left, None) if need else None for need in needed]
    return (*grads[:3], *[None] * 10, *grads[3:], None)
