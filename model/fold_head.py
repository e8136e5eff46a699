"""Folds linear steps of a head (batch norms, 1x1 convolutions, further linear layers) into its one linear layer."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .head_pattern import HeadPattern, match_head, plain_parts


def match_or_fold(module: nn.Module) -> HeadPattern | str:
    """Return the pattern of a classifier, that of its folded form if it has none itself, or the reason against both.

    Folded is what is linear in eval mode, so that the answer is the same but for rounding: BatchNorm1d, further Linears
    behind the pool; BatchNorm2d and Conv2d of 1x1 before an average pool, or before a Flatten. The parameters of a
    folded form are new: training it trains one linear layer.
    """
    pattern = match_head(module)
    if not isinstance(pattern, str) or type(module) is not nn.Sequential:
        return pattern
    steps = _steps_of(module)
    if steps is None:
        return pattern
    if module.training:
        return f"{pattern}; in eval mode it could be folded into the Linear"
    return match_head(_fold(steps))


class _Steps(NamedTuple):
    """The layers of a head that can be folded."""

    before: list[nn.Module]
    """Of a map, the same at each place of it."""
    shaping: list[nn.Module]
    """Pool and Flatten."""
    after: list[nn.Module]
    """Of vectors."""
    last: nn.Linear
    softmax: list[nn.Module]


def _steps_of(module: nn.Sequential) -> _Steps | None:
    """Take a head apart; None if a layer is not linear, or not of a kind that is folded."""
    parts = [part for _, part in plain_parts(module) if type(part) not in (nn.Identity, nn.Dropout)]
    softmax = [parts.pop()] if parts and type(parts[-1]) is nn.Softmax else []
    places = [index for index, part in enumerate(parts) if type(part) in (nn.AdaptiveAvgPool2d, nn.Flatten)]
    if places and places != [*range(places[0], places[0] + len(places))]:
        return None
    start, end = (places[0], places[-1] + 1) if places else (0, 0)
    before, after = parts[:start], parts[end:-1]
    last = parts[-1] if parts[end:] else None
    if type(last) is not nn.Linear or not all(map(_is_map_step, before)) or not all(map(_is_vector_step, after)):
        return None
    return _Steps(before, parts[start:end], after, last, softmax)


def _is_vector_step(part: nn.Module) -> bool:
    return type(part) is nn.Linear or type(part) is nn.BatchNorm1d and part.running_mean is not None


def _is_map_step(part: nn.Module) -> bool:
    if type(part) is nn.Conv2d:
        plain = part.kernel_size == part.stride == (1, 1) and part.groups == 1
        return plain and part.padding in ((0, 0), "valid", "same")
    return type(part) is nn.BatchNorm2d and part.running_mean is not None


def _fold(steps: _Steps) -> nn.Sequential:
    """Return pool, flatten and one linear layer that compute the same."""
    last = steps.last
    weight = last.weight.detach().double()
    bias = weight.new_zeros(len(weight)) if last.bias is None else last.bias.detach().double()
    for part in reversed(steps.after):
        weight, bias = _before(part, weight[:, :, None], bias)
        weight = weight[:, :, 0]
    for part in reversed(steps.before):  # the same at each place of the map, of which the pool takes means
        channels = part.out_channels if isinstance(part, nn.Conv2d) else part.num_features
        weight, bias = _before(part, weight.view(len(weight), channels, -1), bias)  # type: ignore[arg-type]
        weight = weight.flatten(1)
    linear = nn.Linear(weight.shape[1], len(weight), device=last.weight.device, dtype=last.weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return nn.Sequential(*steps.shaping, linear, *steps.softmax).eval()


def _before(part: nn.Module, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight [K, in, P] and bias [K] of a layer [K, out, P] with a step before it, the same at P places."""
    if isinstance(part, (nn.Linear, nn.Conv2d)):
        matrix = part.weight.detach().double().flatten(1)  # [out, in]
        if part.bias is not None:
            bias = bias + (weight * part.bias.detach()[:, None]).sum(dim=(1, 2))
        return torch.einsum("kop,oi->kip", weight, matrix), bias
    assert isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d))
    assert part.running_mean is not None and part.running_var is not None
    scale = (part.running_var.double() + part.eps).rsqrt()
    if part.affine:
        scale = scale * part.weight.detach()
        bias = bias + (weight * part.bias.detach()[:, None]).sum(dim=(1, 2))
    weight = weight * scale[:, None]
    return weight, bias - (weight * part.running_mean.double()[:, None]).sum(dim=(1, 2))
