"""Modules that heads are made of, and those that look like heads: which they are, and what to write instead."""

from torch import nn
from torch.nn.parameter import is_lazy

from ..listening.hooks import put_on_state, why_not_plain

POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
#: Modules that shape features, or may end a head.
SHAPING_MODULES = (*POOLS, nn.AvgPool2d, nn.Flatten, nn.Dropout, nn.Identity, nn.Linear, nn.Softmax)
ACTIVATION_MODULES = (nn.ReLU, nn.GELU, nn.Hardswish)
KNOWN_MODULES = (*SHAPING_MODULES, nn.LayerNorm, *ACTIVATION_MODULES)


def activation_of(part: nn.Module) -> str | None:
    """Return the name of an activation that heads have; None for any other module."""
    if type(part) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(part.approximate)
    return "relu" if type(part) is nn.ReLU else "hardswish" if type(part) is nn.Hardswish else None


def module_of_activation(name: str) -> nn.Module:
    """Return a module of the activation with a name."""
    modules: dict[str, nn.Module] = {
        "relu": nn.ReLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "hardswish": nn.Hardswish()
    }  # fmt: skip
    return modules[name]


def plain_parts(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules that a plain nn.Sequential calls, in order, nested ones unpacked."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():  # named_children() would skip a module that occurs twice
        if child is None:
            continue
        nested = type(child) is nn.Sequential and why_not_plain(child) is None and put_on_state(child) is None
        parts += plain_parts(child, f"{prefix}{name}.") if nested else [(prefix + name, child)]
    return parts


def number_of_classes(model: nn.Module) -> int | None:
    """Return the outputs of the model's last Linear that no matrix of the model could take up; None if there is none.

    The one Linear of a head that pools reads a map, and so nothing that another Linear gives.
    """
    layers = [*model.modules()]
    behind_pools = {_behind_pool(layer) for layer in layers if type(layer) is nn.Sequential}
    matrices = [
        parameter
        for layer in layers
        if layer not in behind_pools
        for parameter in layer.parameters(recurse=False)
        if not is_lazy(parameter) and parameter.ndim == 2
    ]
    taken = {matrix.shape[1] for matrix in matrices}
    given = [layer.out_features for layer in layers if isinstance(layer, nn.Linear) and layer.out_features not in taken]
    return given[-1] if given else None


def _behind_pool(chain: nn.Sequential) -> nn.Module | None:
    """Return the one Linear of a chain, if it has one and a pool comes before it."""
    parts = [part for _, part in plain_parts(chain) if isinstance(part, (*POOLS, nn.AvgPool2d, nn.Linear))]
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    return linears[0] if len(linears) == 1 and parts[0] is not linears[0] else None


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


def why_unknown(module: nn.Module) -> str:
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
