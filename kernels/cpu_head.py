"""cpu_head: one head on a CPU in as few of PyTorch's operations as its plain chain takes, without gradients."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused_head_reference import decide, pooled_features
from .head_output import HeadOutput
from .hidden_layers import NO_LAYERS, HiddenLayers


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
