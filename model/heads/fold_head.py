"""Folds linear steps of a head (batch norms, 1x1 convolutions, further linear layers) into its linear layers."""

import copy
import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.launch.check_arguments import head_dtypes
from ..listening.hooks import put_on_state, why_not_plain
from .head_pattern import HeadPattern, match_head, plain_parts


def match_or_fold(module: nn.Module) -> HeadPattern | str:
    """Return the pattern of a classifier, that of its folded form if it has none itself, or the reason against both.

    Folded is what is linear in eval mode, so that the answer is the same but for rounding: BatchNorm1d, further Linears
    behind the pool; BatchNorm2d and Conv2d of 1x1 before an average pool, or before a Flatten. The parameters of a
    folded form are new: training it trains its linear layers.
    """
    pattern = match_head(module)
    if not isinstance(pattern, str) or type(module) is not nn.Sequential:
        return pattern
    with torch.inference_mode(False):  # whose parameters could not be trained
        folded = _fold(module)
    found = pattern if folded is None else folded if isinstance(folded, str) else match_head(folded)
    if isinstance(found, str):
        return f"{pattern}; {found}" if isinstance(folded, str) else pattern
    if any(part.training for part in module.modules()):
        return f"{pattern}; in eval mode it could be folded into the Linear"
    return found._replace(paths={})  # no layer of the classifier has its parameters


#: Runs of steps that can be folded, a letter each: of maps, of vectors, shaping between them, others.
_FOLDED = "o?(msv|s?o?v)(ov)?o?"


def _fold(module: nn.Sequential) -> nn.Sequential | str | None:
    """Return a head without the steps that its linear layers have taken over, or the reason against it.

    None if none is to be folded, or fits.
    """
    parts = [part for _, part in plain_parts(module)]
    if any((why_not_plain(part) or put_on_state(part)) is not None for part in (module, *parts)):
        return None
    if any(one.dtype not in head_dtypes(one.device) for one in module.parameters()):
        return None
    if any(one.layout is not torch.strided for one in (*module.parameters(), *module.buffers())):
        return None
    steps = [part for part in parts if type(part) not in (nn.Identity, nn.Dropout)]
    runs = [(letter, [*run]) for letter, run in groupby(steps, _letter)]
    if re.fullmatch(_FOLDED, "".join(letter for letter, _ in runs)) is None:
        return None
    if not any(letter == "m" or (letter == "v" and len(run) > 1) for letter, run in runs):
        return None
    folded: list[nn.Module] = []
    maps: list[nn.Module] = []
    for letter, run in runs:
        if letter == "m":
            maps = run
        elif letter != "v":
            folded += copy.deepcopy(run)
        elif not any(type(part) is nn.Linear for part in run) or not _fits(maps, run):
            return None
        elif _cancels(maps, run):
            return "folded in half precision its batch norm would be rounded off: make it a head in float32"
        else:
            folded.append(_as_one(run, maps))
            maps = []
    return nn.Sequential(*folded).eval()


def _cancels(maps: Sequence[nn.Module], vectors: Sequence[nn.Module]) -> bool:
    """Return whether, in half precision, a batch norm before a Linear takes off more than it leaves.

    PyTorch does so in float32. A folded weight is rounded before, and multiplies what is taken off, too. Of a norm on
    "meta" it is not known.
    """
    at = max(index for index, part in enumerate(vectors) if type(part) is nn.Linear)
    linear: Any = vectors[at]
    before: list[Any] = [*maps, *vectors[:at]]
    return linear.weight.element_size() == 2 and any(
        bool((norm.running_mean.float().square() > norm.running_var.float() + norm.eps).any())
        for norm in before
        if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d) and not norm.running_mean.is_meta
    )


def _fits(maps: Sequence[nn.Module], vectors: Sequence[nn.Module]) -> bool:
    """Return whether each step makes as many channels, or features, as the next takes: else it may be of tokens."""
    widths = [_widths(part) for part in (*maps, *vectors)]
    at = len(maps)  # where channels become features, each of as many pixels
    fits = [made == taken for (_, made), (taken, _) in pairwise(widths)]
    if at:
        fits[at - 1] = widths[at][0] % widths[at - 1][1] == 0
    return all(fits)


def _widths(part: Any) -> tuple[int, int]:
    """Return how many channels or features a step takes, and makes."""
    if isinstance(part, nn.Conv2d):
        return part.in_channels, part.out_channels
    return (part.in_features, part.out_features) if isinstance(part, nn.Linear) else (part.num_features,) * 2


def _letter(part: nn.Module) -> str:
    """Return which kind of step a layer is: of maps, the same at each pixel, of vectors, between both, or another."""
    if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
        statistics = part.running_mean is not None and part.running_var is not None
        linear = type(part) in (nn.BatchNorm1d, nn.BatchNorm2d) and statistics
        return "o" if not linear else "v" if type(part) is nn.BatchNorm1d else "m"
    if type(part) is nn.Conv2d:
        plain = part.kernel_size == part.stride == (1, 1) and part.groups == 1
        return "m" if plain and part.padding in ((0, 0), "valid", "same") else "o"
    if type(part) is nn.Linear:
        return "v"
    if type(part) is nn.Flatten:
        return "s" if (part.start_dim, part.end_dim) == (1, -1) else "o"
    return "s" if type(part) in (nn.AdaptiveAvgPool2d, nn.AvgPool2d) else "o"


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
    scale = scale if norm.weight is None else scale * norm.weight.detach()
    shift = -norm.running_mean.double() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach()
