"""Modules that heads are made of, and the order in which an ``nn.Sequential`` calls them."""

from torch import nn

from .hooks import why_not_plain

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
        nested = type(child) is nn.Sequential and why_not_plain(child) is None
        parts += plain_parts(child, f"{prefix}{name}.") if nested else [(prefix + name, child)]
    return parts
