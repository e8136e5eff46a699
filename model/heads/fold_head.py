"""Folds linear steps of a head (batch norms, 1x1 convolutions, further linear layers) into its linear layers."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..listening.hooks import put_on_state, why_not_plain
from .head_pattern import HeadPattern, activation_of, match_head, plain_parts


def match_or_fold(module: nn.Module) -> HeadPattern | str:
    """Return the pattern of a classifier, that of its folded form if it has none itself, or the reason against both.

    Folded is what is linear in eval mode, so that the answer is the same but for rounding: BatchNorm1d, further Linears
    behind the pool; BatchNorm2d and Conv2d of 1x1 before an average pool, or before a Flatten. The parameters of a
    folded form are new: training it trains its linear layers.
    """
    pattern = match_head(module)
    if not isinstance(pattern, str) or type(module) is not nn.Sequential:
        return pattern
    steps = _steps_of(module)
    if steps is None:
        return pattern
    folded = match_head(_fold(steps))
    if isinstance(folded, str):
        return pattern
    if any(part.training for part in module.modules()):
        return f"{pattern}; in eval mode it could be folded into the Linear"
    return folded._replace(paths={})  # no layer of the classifier has its parameters


class _Steps(NamedTuple):
    """The layers of a head that can be folded."""

    rectifier: list[nn.Module]
    """A ReLU before all others, or none."""
    before: list[nn.Module]
    """Of a map, the same at each of its pixels."""
    shaping: list[nn.Module]
    """Pool and Flatten."""
    norm: list[nn.Module]
    """A LayerNorm, or none; then nothing comes before the pool."""
    first: list[nn.Module]
    """Linear steps of vectors, up to an activation or the end."""
    activation: list[nn.Module]
    """One, and then linear steps follow; or none."""
    last: list[nn.Module]
    softmax: list[nn.Module]


def _steps_of(module: nn.Sequential) -> _Steps | None:
    """Take a head apart; None if a layer is not linear, not plain, or not of a kind that is folded."""
    parts = [part for _, part in plain_parts(module)]
    if any((why_not_plain(part) or put_on_state(part)) is not None for part in (module, *parts)):
        return None
    parts = [part for part in parts if type(part) not in (nn.Identity, nn.Dropout)]
    softmax = [parts.pop()] if parts and type(parts[-1]) is nn.Softmax else []
    rectifier = [parts.pop(0)] if parts and type(parts[0]) is nn.ReLU else []
    kinds = (nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.Flatten)
    shaping_at = [index for index, part in enumerate(parts) if type(part) in kinds]
    if shaping_at and shaping_at != [*range(shaping_at[0], shaping_at[0] + len(shaping_at))]:
        return None
    start, end = (shaping_at[0], shaping_at[-1] + 1) if shaping_at else (0, 0)
    before, shaping, vectors = parts[:start], parts[start:end], parts[end:]
    norm = [vectors.pop(0)] if vectors and type(vectors[0]) is nn.LayerNorm else []
    activations = [index for index, part in enumerate(vectors) if activation_of(part) is not None]
    middle = activations[0] if activations else len(vectors)
    first, activation, last = vectors[:middle], vectors[middle : middle + 1], vectors[middle + 1 :]
    if len(activations) > 1 or (norm and before) or not all(map(_is_map_step, before)):
        return None
    if not _has_linear(first) or (activation and not _has_linear(last)):
        return None
    return _Steps(rectifier, before, shaping, norm, first, activation, last, softmax)


def _has_linear(parts: Sequence[nn.Module]) -> bool:
    """Return whether steps of vectors are linear, and one of them is a Linear."""
    return all(map(_is_vector_step, parts)) and any(type(part) is nn.Linear for part in parts)


def _is_vector_step(part: nn.Module) -> bool:
    return type(part) is nn.Linear or type(part) is nn.BatchNorm1d and part.running_mean is not None


def _is_map_step(part: nn.Module) -> bool:
    if type(part) is nn.Conv2d:
        plain = part.kernel_size == part.stride == (1, 1) and part.groups == 1
        return plain and part.padding in ((0, 0), "valid", "same")
    return type(part) is nn.BatchNorm2d and part.running_mean is not None


def _fold(steps: _Steps) -> nn.Sequential:
    """Return a head without the steps that its linear layers have taken over."""
    first = _as_one(steps.first, steps.before)
    last = [_as_one(steps.last, [])] if steps.last else []
    norm = copy.deepcopy(steps.norm)
    return nn.Sequential(
        *steps.rectifier, *steps.shaping, *norm, first, *steps.activation, *last, *steps.softmax
    ).eval()


def _as_one(vectors: Sequence[nn.Module], maps: Sequence[nn.Module]) -> nn.Linear:
    """Return one linear layer for steps of vectors, behind a mean of what steps of maps make."""
    at = max(index for index, part in enumerate(vectors) if type(part) is nn.Linear)
    own = vectors[at]
    assert isinstance(own, nn.Linear)
    weight = own.weight.detach().double()
    bias = weight.new_zeros(len(weight)) if own.bias is None else own.bias.detach().double()
    for norm in vectors[at + 1 :]:
        scale, shift = _scale_and_shift(norm)
        weight, bias = weight * scale[:, None], bias * scale + shift
    for part in reversed(vectors[:at]):
        weight, bias = _before(part, weight[:, :, None], bias)
        weight = weight[:, :, 0]
    for part in reversed(maps):  # the same at each pixel of the map, of which the pool takes means
        channels = part.out_channels if isinstance(part, nn.Conv2d) else part.num_features
        weight, bias = _before(part, weight.view(len(weight), channels, -1), bias)  # type: ignore[arg-type]
        weight = weight.flatten(1)
    linear = nn.Linear(weight.shape[1], len(weight), device="meta")  # its own parameters are dropped
    linear.weight, linear.bias = (nn.Parameter(one.to(own.weight, copy=True)) for one in (weight, bias))
    return linear.requires_grad_(any(each.requires_grad for part in (*vectors, *maps) for each in part.parameters()))


def _before(part: nn.Module, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [K, in, P] and bias [K] of a layer [K, out, P] with a step before it, the same at P pixels."""
    if isinstance(part, (nn.Linear, nn.Conv2d)):
        matrix = part.weight.detach().double().flatten(1)  # [out, in]
        if part.bias is not None:
            bias = bias + (weight * part.bias.detach()[:, None]).sum(dim=(1, 2))
        return torch.einsum("kop,oi->kip", weight, matrix), bias
    scale, shift = _scale_and_shift(part)
    return weight * scale[:, None], bias + (weight * shift[:, None]).sum(dim=(1, 2))


def _scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return what a batch norm multiplies each channel by in eval mode, and what it then adds, in float64."""
    assert isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d))
    assert norm.running_mean is not None and norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if not norm.affine:
        return scale, -norm.running_mean.double() * scale
    scale = scale * norm.weight.detach()
    return scale, norm.bias.detach() - norm.running_mean.double() * scale
