"""Gradients of a head: of the operator, and of a planned call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .fused_head_reference import fused_head_reference
from .head_output import HeadOutput
from .head_plan import HeadPlan


def save_for_backward(
    ctx: Any,
    tensors: tuple[Tensor | None, ...],
    output: Sequence[Tensor | None],
    *,
    temperature: float,
    pool: str,
    pool_size: tuple[int, int],
    criterion: str,
    return_probs: bool,
) -> None:
    """Save what :func:`backward` needs; the tensors are x, weight, bias and, None for the number, the temperature."""
    ctx.save_for_backward(*tensors)
    ctx.options = (temperature, pool, pool_size, criterion, return_probs)
    ctx.mark_non_differentiable(output[1], output[3])
    ctx.set_materialize_grads(False)


def backward(ctx: Any, grad_probs: Tensor | None, grad_confidence: Tensor | None) -> list[Tensor | None]:
    """Return the gradients of x, weight and bias: recompute the head in PyTorch and differentiate that.

    It is twice differentiable if a second derivative is wanted.
    """
    twice = torch.is_grad_enabled()
    inputs: list[Any]
    *inputs, temperature_tensor = ctx.saved_tensors
    temperature, pool, pool_size, criterion, return_probs = ctx.options
    needed = ctx.needs_input_grad[:3]
    with torch.enable_grad():
        leaves: list[Any] = [
            t if t is None or twice else t.detach().requires_grad_(need) for t, need in zip(inputs, needed, strict=True)
        ]
        heat = temperature if temperature_tensor is None else temperature_tensor
        output = fused_head_reference(
            *leaves, pool=pool, pool_size=pool_size, temperature=heat, threshold=1.0, criterion=criterion
        )
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


def follow_differentiably(
    plan: HeadPlan, x: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, **options: Any
) -> HeadOutput:
    """Answer by a plan, differentiably in x, weight and bias.

    The temperature is that of the plan; options are ``pool``, ``pool_size``, ``criterion`` and ``return_probs``, those
    of the plan.
    """
    return HeadOutput(*_Followed.apply(x, weight, bias, temperature, plan, options))


class _Followed(torch.autograd.Function):
    """A planned call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> HeadOutput:
        *tensors, plan, options = arguments
        output: HeadOutput = plan(tensors[0])
        save_for_backward(ctx, tuple(tensors), output, temperature=1.0, **options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_probs, _, grad_confidence, _ = grads
        return (*backward(ctx, grad_probs, grad_confidence), None, None, None)
