"""Recognises the ``nn.Sequential`` classifiers that a fused head can stand in for."""

from typing import Any, NamedTuple

from torch import nn

from ..kernels.head_arguments import FLOAT_DTYPES
from .arguments import HEAD_DTYPES

KNOWN_MODULES = (
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.Flatten,
    nn.Dropout,
    nn.Identity,
    nn.Linear,
    nn.Softmax,
)


class HeadPattern(NamedTuple):
    """A classifier of a known shape, read off its modules."""

    pool: str
    pool_size: tuple[int, int]
    dropout: float
    linear_path: str
    """Name of the linear layer within the classifier, dotted if nested."""
    linear: nn.Linear


def match_head(module: nn.Module) -> HeadPattern | str:
    """Return the pattern of a classifier, or the reason why it has none."""
    if type(module) is not nn.Sequential:
        return f"is a {type(module).__name__}, not an nn.Sequential, so that what its forward does is not known"
    pool, pool_size, keep = "none", (1, 1), 1.0
    pooled = flattened = False
    linear: tuple[str, nn.Linear] | None = None
    softmaxed = False
    for path, part in _parts(module):
        where = f"'{path}' ({type(part).__name__})"
        if "forward" in vars(part):
            return f"{where} has a forward of its own"
        if has_hooks(part):
            return f"{where} carries hooks, which a fused head would not call"
        if type(part) is nn.Identity:
            continue
        if softmaxed or (linear is not None and type(part) is not nn.Softmax):
            return f"{where} follows the {'Softmax' if softmaxed else 'Linear'}: only Softmax and Identity may"
        if type(part) in (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d):
            if pooled or flattened or keep != 1.0:
                return f"{where} is not the first of pool, Flatten and Dropout"
            if type(part) is nn.AdaptiveMaxPool2d and part.return_indices:
                return f"{where} returns indices too"
            size: Any = part.output_size
            pair = (size, size) if isinstance(size, int) else tuple(size)
            if None in pair:
                return f"{where} takes a size of its grid from the input"
            pool, pool_size, pooled = ("avg" if type(part) is nn.AdaptiveAvgPool2d else "max"), pair, True
        elif type(part) is nn.Flatten:
            if (part.start_dim, part.end_dim) != (1, -1):
                return f"{where} flattens dimensions {part.start_dim} to {part.end_dim}, not 1 to -1"
            flattened = True
        elif type(part) is nn.Dropout:
            keep *= 1.0 - part.p
        elif type(part) is nn.Linear:
            if pooled and not flattened:
                return f"{where} follows a pool without a Flatten between them"
            linear = (path, part)
        elif type(part) is nn.Softmax:
            if linear is None:
                return f"{where} comes before the Linear"
            if part.dim not in (1, -1, None):
                return f"{where} normalises dimension {part.dim}, not the classes"
            softmaxed = True
        else:
            return f"{where} is none of {', '.join(known.__name__ for known in KNOWN_MODULES)}"
    if linear is None:
        return "has no Linear"
    if linear[1].weight.dtype not in FLOAT_DTYPES:
        return f"is {linear[1].weight.dtype}, wants {HEAD_DTYPES}: call its .float(), say"
    if has_hooks(module):
        return "carries hooks, which a fused head would not call"
    if "forward" in vars(module):
        return "has a forward of its own"
    return HeadPattern(pool, pool_size, 1.0 - keep, *linear)


def _parts(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules that a plain nn.Sequential calls, in order, nested ones unpacked."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():  # named_children() would skip a module that occurs twice
        if child is None:
            continue
        nested = type(child) is nn.Sequential and not has_hooks(child) and "forward" not in vars(child)
        parts += _parts(child, f"{prefix}{name}.") if nested else [(prefix + name, child)]
    return parts


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module carries hooks of its own, which whatever stands in for it would not call."""
    return any(
        getattr(module, name)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )
