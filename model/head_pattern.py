"""Recognises the ``nn.Sequential`` classifiers that a fused head can stand in for, and modules that look like heads."""

from typing import Any, NamedTuple

from torch import nn

from ..kernels.head_arguments import head_dtypes, head_dtypes_in_words
from .hooks import has_hooks

POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
KNOWN_MODULES = (
    *POOLS,
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
        return _why_unknown(module)
    pool, pool_size, keep = "none", (1, 1), 1.0
    pooled = flattened = False
    linear: tuple[str, nn.Linear] | None = None
    softmaxed = False
    for path, part in plain_parts(module):
        where = f"'{path}' ({type(part).__name__})"
        if "forward" in vars(part):
            return f"{where} has a forward of its own"
        if has_hooks(part):
            return f"{where} carries hooks, which a fused head would not call"
        if type(part) is nn.Identity:
            continue
        if softmaxed or (linear is not None and type(part) is not nn.Softmax):
            return f"{where} follows the {'Softmax' if softmaxed else 'Linear'}: only Softmax and Identity may"
        if type(part) in POOLS:
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
    weight = linear[1].weight
    if weight.dtype not in head_dtypes(weight.device):
        return f"is {weight.dtype}, wants {head_dtypes_in_words(weight.device)}: call its .float(), say"
    if has_hooks(module):
        return "carries hooks, which a fused head would not call"
    if "forward" in vars(module):
        return "has a forward of its own"
    return HeadPattern(pool, pool_size, 1.0 - keep, *linear)


def number_of_classes(model: nn.Module) -> int | None:
    """Return the outputs of the model's last Linear that no Linear of the model takes up; None if there is none."""
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    taken = {linear.in_features for linear in linears}
    given = [linear.out_features for linear in linears if linear.out_features not in taken]
    return given[-1] if given else None


def could_be_head(module: nn.Module, classes: int | None, *, alone: bool) -> bool:
    """Return whether a module looks like a head: three convolutions and Linears at most, the last one for the classes.

    A Linear by itself is one only where ``alone`` says so, and a container without a forward is none.
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or isinstance(module, nn.Linear) and not alone:
        return False
    layers = [part for part in module.modules() if isinstance(part, (nn.Linear, nn.modules.conv._ConvNd))]
    if not 1 <= len(layers) <= 3 or not isinstance(layers[-1], nn.Linear):
        return False
    return layers[-1].out_features == classes


def _why_unknown(module: nn.Module) -> str:
    """Say that a module is no nn.Sequential, and what to write instead, where the names of its parts show it."""
    kind = type(module).__name__
    kind = f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    linears = [path for path, part in module.named_modules() if type(part) is nn.Linear]
    if not linears:
        return f"is {kind}, wants an nn.Sequential of {', '.join(known.__name__ for known in KNOWN_MODULES)}"
    linear = _as_code(module, linears[-1])
    if len(linears) > 1:  # the last of them reads vectors
        steps, parts = f"last step is {linear}", linear
    else:
        pools = [path for path, part in module.named_modules() if type(part) in POOLS]
        pool = _as_code(module, pools[-1]) if pools else "nn.AdaptiveAvgPool2d(1)"
        steps, parts = f"last steps are a pool, a flatten and {linear}", f"{pool}, nn.Flatten(), {linear}"
    use = f"use FusedAuxHead.from_module(nn.Sequential({parts}))"
    if type(module) is nn.Linear:
        return f"is {kind} alone; where a pool and a flatten come before it, {use} for all three"
    return f"is {kind} with a forward of its own, which is not read; if its {steps}, {use} for that"


def _as_code(head: nn.Module, path: str) -> str:
    """Return how Python writes a part of ``head``."""
    code = "head"
    for name in path.split(".") if path else ():
        attribute = name.isidentifier() and not isinstance(head, nn.ModuleDict)
        code += f".{name}" if attribute else f"[{name}]" if name.isdigit() else f"[{name!r}]"
        head = head.get_submodule(name)
    return code


def plain_parts(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules that a plain nn.Sequential calls, in order, nested ones unpacked."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():  # named_children() would skip a module that occurs twice
        if child is None:
            continue
        nested = type(child) is nn.Sequential and not has_hooks(child) and "forward" not in vars(child)
        parts += plain_parts(child, f"{prefix}{name}.") if nested else [(prefix + name, child)]
    return parts
