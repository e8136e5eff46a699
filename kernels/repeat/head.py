"""A head's call, checked once and repeated for inputs of the same layout: a launch, on a CPU PyTorch's operations."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..followed import is_followed
from ..head_backward import backward, save_for_backward
from ..head_output import HeadOutput
from ..launch.choose_config import overrides
from ..launch.residency import is_recording
from ..reference.fused_head import decide, pooled_features
from ..reference.hidden_layers import NO_LAYERS, HiddenLayers
from .noted import NotedLaunch, are_launches_watched


def cpu_head(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    threshold: Tensor,
    *,
    pool: str,
    pool_size: tuple[int, int],
    criterion: str = "max_prob",
    return_probs: bool,
    hidden: HiddenLayers = NO_LAYERS,
) -> HeadOutput:
    """Answer as ``fused_head_reference`` does, bit for bit.

    Arguments are those of ``fused_head``, checked, and the rule's tensors have no dimension. The temperature, mostly 1,
    is read here, and a NaN is looked for among the confidences alone, by the host.
    """
    if x.dtype not in (torch.float32, torch.float64):
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    if hidden is NO_LAYERS:
        features = pooled_features(x, pool, pool_size)
    else:
        features = hidden.to(x.dtype).apply(pooled_features(F.relu(x) if hidden.rectifies else x, pool, pool_size))
    logits = F.linear(features, weight, bias)
    divisor = temperature.item()
    if criterion != "max_prob":
        output = decide(logits, temperature, threshold, criterion)
        return output if return_probs else output._replace(probs=None)
    if divisor == 1.0:
        label = logits.argmax(-1)
        probs = torch.softmax(logits, -1)  # which subtracts the largest itself, to the same effect
    else:  # a logit divided by the temperature may overflow
        largest, label = logits.max(-1)
        probs = torch.softmax((logits - largest[:, None]) / divisor, -1)
    confidence = probs.amax(-1)
    if not 0.0 < divisor < math.inf or math.isnan(sum(confidence.tolist())):
        output = decide(logits, temperature, threshold)
        return output if return_probs else output._replace(probs=None)
    return HeadOutput(probs if return_probs else None, label, confidence, confidence > threshold)


#: Workspace of the kernel: 0 before a launch and after it, or of no interest outside of it.
_WORKSPACE = ("features", "partial", "arrived", "tickets")


class HeadRepeat:
    """A launch of the kernel on one stream, whose launches share its workspace, as they run one after another."""

    def __init__(self, noted: NotedLaunch, x: Tensor, stream: int) -> None:
        """Repeat a launch that was made for an input like x on a stream, given by its handle."""
        given = noted.given()
        self._samples, self._classes = len(x), given["CLASSES"]
        self._with_probs = given["probs"] is not None
        # Tensors to make others like: torch.empty takes twice the time, since it looks for the device.
        self._floats, self._ints, self._bools = (
            torch.empty(1, dtype=dtype, device=x.device) for dtype in (torch.float32, torch.int64, torch.bool)
        )
        self._of: Callable[[Tensor], Any] = Tensor.data_ptr if noted.compiled else lambda tensor: tensor
        varying = ("x", "label", "confidence", "exits", *(("probs",) if self._with_probs else ()))
        self._repeat = noted.repeat([(name,) for name in varying], stream)
        self._workspace = [*(given[name] for name in _WORKSPACE), given["last"]]

    def __call__(self, x: Tensor) -> HeadOutput:
        """Launch on the stream, which is current; the tensors lie where those of the noted launch did."""
        samples = self._samples
        probs = self._floats.new_empty((samples, self._classes)) if self._with_probs else None
        label = self._ints.new_empty(samples)
        confidence = self._floats.new_empty(samples)
        exits = self._bools.new_empty(samples)
        given = (x, label, confidence, exits) if probs is None else (x, label, confidence, exits, probs)
        self._repeat([*map(self._of, given)])
        return HeadOutput(probs, label, confidence, exits)


def is_watched() -> bool:
    """Return whether somebody follows operations of this thread, or launches of head kernels, or changes them."""
    return is_followed() or overrides.get() is not None or is_recording() or are_launches_watched()


def repeat_differentiably(
    repeat: Callable[[Tensor], HeadOutput],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    hidden: HiddenLayers = NO_LAYERS,
    **options: Any,
) -> HeadOutput:
    """Answer by a repeated call, differentiably in x, weight, bias and the hidden layers' parameters.

    The temperature is that of the call; options are ``pool``, ``pool_size``, ``criterion`` and ``return_probs``, those
    of the call.
    """
    parameters = () if hidden is NO_LAYERS else [one for _, one in hidden.tensors()]
    return HeadOutput(*_Repeated.apply(x, weight, bias, temperature, *parameters, repeat, hidden, options))


class _Repeated(torch.autograd.Function):
    """A repeated call."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> HeadOutput:
        *tensors, repeat, hidden, options = arguments
        output: HeadOutput = repeat(tensors[0])
        if len(tensors) > 4:  # autograd's own, where there are any
            hidden = hidden.with_tensors(tensors[4:])
        save_for_backward(ctx, tuple(tensors[:4]), output, temperature=1.0, hidden=hidden, **options)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_probs, _, grad_confidence, _ = grads
        wanted = ctx.needs_input_grad[:-3]  # of the tensors
        needed = (*wanted[:3], *(wanted[4:] or [False] * 4))
        found = backward(ctx, needed, grad_probs, grad_confidence)
        return (*found[:3], None, *found[3 : len(wanted) - 1], None, None, None)
