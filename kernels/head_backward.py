"""Gradients of a head, of the operator and of a repeated call: what is saved for them, and the backward pass."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .reference.fused_head import fused_head_reference
from .reference.hidden_layers import NO_LAYERS, HiddenLayers


def save_for_backward(
    ctx: Any, tensors: tuple[Tensor | None, ...], output: Sequence[Tensor | None], *, temperature: float, pool: str,
    pool_size: tuple[int, int], criterion: str, return_probs: bool, hidden: HiddenLayers = NO_LAYERS,
) -> None:  # fmt: skip
    """Save what :func:`backward` needs; the tensors are x, weight, bias and, None for the number, the temperature."""
    parameters = [one for _, one in hidden.tensors()]
    ctx.save_for_backward(*tensors, *parameters)
    # a context must not keep tensors in any other way
    without = hidden.with_tensors([None] * 4)
    ctx.options = (temperature, pool, pool_size, criterion, return_probs, without)
    ctx.mark_non_differentiable(output[1], output[3])
    ctx.set_materialize_grads(False)


def backward(
    ctx: Any, needed: Sequence[bool], grad_probs: Tensor | None, grad_confidence: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients of x, weight, bias and the hidden layers' parameters: differentiate the head in PyTorch.

    ``needed`` says of each whether its gradient is wanted. They are twice differentiable if a second derivative is.
    """
    twice = torch.is_grad_enabled()
    inputs: list[Any]
    x, weight, bias, temperature_tensor, *parameters = ctx.saved_tensors
    inputs = [x, weight, bias, *parameters]
    temperature, pool, pool_size, criterion, return_probs, without = ctx.options
    with torch.enable_grad():
        leaves: list[Any] = [
            t if t is None or twice else t.detach().requires_grad_(need) for t, need in zip(inputs, needed, strict=True)
        ]
        divisor = temperature if temperature_tensor is None else temperature_tensor
        output = fused_head_reference(
            *leaves[:3], pool=pool, pool_size=pool_size, temperature=divisor, threshold=1.0, criterion=criterion,
            hidden=without.with_tensors(leaves[3:]),
        )  # fmt: skip
        # terms of the loss to first order, so that one call differentiates through both outputs
        terms = [] if grad_confidence is None else [(output.confidence * grad_confidence).sum()]
        if return_probs and grad_probs is not None and output.probs is not None:
            terms.append((output.probs * grad_probs).sum())
    wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
    gradients: Sequence[Tensor] = ()
    if terms:
        gradients = torch.autograd.grad(terms, wanted, [torch.ones_like(term) for term in terms], create_graph=twice)
    grads = iter(gradients)
    return [next(grads, None) if need else None for need in needed]
