"""Recognises the ``nn.Sequential`` classifiers that a fused head can stand in for, and says why others are none."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ...kernels.launch.check_arguments import ONE_LOGIT, head_dtypes, head_dtypes_in_words
from ...kernels.reference.hidden_layers import MOST_HIDDEN
from ..listening.hooks import put_on_state, why_not_plain
from .head_layers import HiddenStack

POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
#: Modules of activations by the names that kernels have for them.
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "gelu": nn.GELU, "gelu_tanh": partial(nn.GELU, approximate="tanh"), "hardswish": nn.Hardswish
}  # fmt: skip
#: Modules that a head may have, by the steps that they are.
_STEPS: dict[type[nn.Module], str] = {
    nn.AdaptiveAvgPool2d: "pool",
    nn.AdaptiveMaxPool2d: "pool",
    nn.AvgPool2d: "pool",
    nn.Flatten: "flatten",
    nn.Dropout: "dropout",
    nn.Identity: "identity",
    nn.Linear: "linear",
    nn.Softmax: "softmax",
    nn.LayerNorm: "norm",
    nn.ReLU: "activation",
    nn.GELU: "activation",
    nn.Hardswish: "activation",
}
#: By what was read so far, the steps that may come next, and what was read then.
_NEXT: dict[str, dict[str, str]] = {
    "nothing": {
        "relu": "a ReLU", "pool": "a pool", "flatten": "a vector", "dropout": "a dropped vector", "norm": "a norm",
        "linear": "a linear",
    },
    "a ReLU": {
        "pool": "a pool", "flatten": "a vector", "dropout": "a dropped vector", "norm": "a norm", "linear": "a linear",
    },
    "a pool": {"flatten": "a vector", "dropout": "a dropped pool"},
    "a dropped pool": {"flatten": "a dropped vector", "dropout": "a dropped pool"},
    "a vector": {"flatten": "a vector", "dropout": "a dropped vector", "norm": "a norm", "linear": "a linear"},
    "a dropped vector": {"flatten": "a dropped vector", "dropout": "a dropped vector", "linear": "a linear"},
    "a norm": {"dropout": "a dropped norm", "linear": "a linear"},
    "a dropped norm": {"dropout": "a dropped norm", "linear": "a linear"},
    "a linear": {"activation": "an activation", "softmax": "the end"},
    "an activation": {"dropout": "an activation", "linear": "the last linear"},
    "the last linear": {"softmax": "the end"},
    "the end": {},
}  # fmt: skip
_ORDER = (
    "is out of place: a fused head has ReLU, pool, Flatten, LayerNorm, Dropout, Linear, activation, Dropout, Linear, "
    "Softmax, in this order, and needs none but a Linear"
)


class HeadPattern(NamedTuple):
    """A classifier of a known shape, read off its modules."""

    pool: str
    pool_size: tuple[int, int]
    map_size: tuple[int, int] | None
    """The one size of maps on which an AvgPool2d is this pool; None for any."""
    dropout: float
    linear: nn.Linear
    """The last one."""
    paths: dict[str, str]
    """Names of layers within the classifier, dotted if nested, by a fused head's names of them."""
    rectifies: bool = False
    norm: nn.LayerNorm | None = None
    hidden: nn.Linear | None = None
    activation: str = "relu"
    hidden_dropout: float = 0.0

    def hidden_stack(self) -> HiddenStack | None:
        """Return the layers before the last one, which share the classifier's; None if there are none."""
        if not self.rectifies and self.norm is None and self.hidden is None:
            return None
        return HiddenStack(
            rectifies=self.rectifies,
            norm=self.norm,
            linear=self.hidden,
            activation=self.activation,
            dropout=self.hidden_dropout,
        )


def match_head(module: nn.Module) -> HeadPattern | str:
    """Return the pattern of a classifier, or the reason why it has none."""
    if type(module) is not nn.Sequential:
        return why_unknown(module)
    read, pool, keep = "nothing", None, [1.0, 1.0]
    rectifies, activation = False, "relu"
    norm: tuple[str, nn.LayerNorm] | None = None
    linears: list[tuple[str, nn.Linear]] = []
    for path, part in plain_parts(module):
        where = f"'{path}' ({type(part).__name__})"
        if (reason := why_not_plain(part)) is not None:
            return f"{where} {reason}, which a fused head would not call"
        if type(part) is nn.Dropout and part.training != module.training:
            return f"{where} is in {'training' if part.training else 'eval'} mode, unlike the classifier"
        step = _STEPS.get(type(part))
        if step is None:
            return f"{where} is none of {', '.join(known.__name__ for known in _STEPS)}"
        if step != "identity":
            step = "relu" if type(part) is nn.ReLU and read == "nothing" else step
            if step not in _NEXT[read]:
                return f"{where} {_ORDER}"
            if (reason := _unknown_option(step, part)) is not None:
                return f"{where} {reason}"
            read = _NEXT[read][step]
        if isinstance(part, nn.Linear):
            linears.append((path, part))
        elif isinstance(part, nn.LayerNorm):
            norm = path, part
        elif isinstance(part, nn.Dropout):
            keep[len(linears)] *= 1.0 - part.p
        elif (reason := put_on_state(part)) is not None:  # of Linear and LayerNorm it stays
            return f"{where} {reason}, which a fused head would not"
        pool = part if step == "pool" else pool
        rectifies |= step == "relu"
        activation = activation_of(part) or activation if step == "activation" else activation
    if read not in ("a linear", "the last linear", "the end"):
        return (
            "ends with an activation: only Softmax and Identity may follow the Linear" if linears else "has no Linear"
        )
    *hidden, (path, linear) = linears
    paths = {"linear": path}
    first = hidden[0][1] if hidden else linear
    if norm is not None:
        if norm[1].normalized_shape != (first.in_features,):
            got = list(norm[1].normalized_shape)
            return f"'{norm[0]}' (LayerNorm) is over {got}, not over all {first.in_features} features of a sample"
        if norm[1].weight is not None and norm[1].weight.dtype != first.weight.dtype:
            return f"'{norm[0]}' (LayerNorm) is {norm[1].weight.dtype}, and the Linear behind it {first.weight.dtype}"
        paths["hidden.norm"] = norm[0]
    if hidden:
        paths["hidden.linear"] = hidden[0][0]
        if first.out_features > MOST_HIDDEN:
            its = f"'{hidden[0][0]}' (Linear) has {first.out_features:,} hidden features"
            return f"{its}, wants at most {MOST_HIDDEN:,}"
    if linear.out_features == 1:
        return ONE_LOGIT
    weight = linear.weight
    if weight.dtype not in head_dtypes(weight.device):
        return f"is {weight.dtype}, wants {head_dtypes_in_words(weight.device)}: call its .float(), say"
    if (reason := why_not_plain(module)) is not None:
        return f"{reason}, which a fused head would not call"
    if (reason := put_on_state(module)) is not None:
        return f"{reason}, which a fused head would not"
    return HeadPattern(
        *_pool_of(pool),
        1.0 - keep[0],
        linear,
        paths,
        rectifies=rectifies,
        norm=None if norm is None else norm[1],
        hidden=hidden[0][1] if hidden else None,
        activation=activation,
        hidden_dropout=1.0 - keep[1],
    )


def _unknown_option(step: str, part: Any) -> str | None:
    """Return what of a module's options a fused head has not; None if it has all."""
    if step == "relu" and part.inplace:
        return "changes in place what other layers may read, wants inplace=False"
    if step == "activation" and activation_of(part) is None:
        return "approximates otherwise than by 'none' or 'tanh'"
    if step == "softmax" and part.dim not in (1, -1, None):
        return f"normalises dimension {part.dim}, not the classes"
    if step == "flatten" and (part.start_dim, part.end_dim) != (1, -1):
        return f"flattens dimensions {part.start_dim} to {part.end_dim}, not 1 to -1"
    if isinstance(part, nn.AvgPool2d):
        window, stride, padding = map(pair, (part.kernel_size, part.stride, part.padding))
        if stride != window or padding != (0, 0) or part.divisor_override is not None:
            return "strides, pads or divides otherwise than by its window, which is to be the whole map"
    elif step == "pool" and getattr(part, "return_indices", False):
        return "returns indices too"
    elif step == "pool" and None in pair(part.output_size):
        return "takes a size of its grid from the input"
    return None


def _pool_of(part: Any) -> tuple[str, tuple[int, int], tuple[int, int] | None]:
    """Return pool, its size and the one size of maps on which an AvgPool2d is that."""
    if part is None:
        return "none", (1, 1), None
    if isinstance(part, nn.AvgPool2d):
        return "avg", (1, 1), pair(part.kernel_size)
    return "avg" if isinstance(part, nn.AdaptiveAvgPool2d) else "max", pair(part.output_size), None


def pair(size: Any) -> tuple[int, int]:
    """Return rows and columns of a size, which may be one number for both."""
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


def activation_of(part: nn.Module) -> str | None:
    """Return the name of an activation that heads have; None for any other module."""
    if type(part) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(part.approximate)
    return "relu" if type(part) is nn.ReLU else "hardswish" if type(part) is nn.Hardswish else None


def module_of_activation(name: str) -> nn.Module:
    """Return a module of the activation with a name."""
    return _ACTIVATIONS[name]()


def plain_parts(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules that a plain nn.Sequential calls, in order, nested ones unpacked."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():  # named_children() would skip a module that occurs twice
        if child is None:
            continue
        nested = type(child) is nn.Sequential and why_not_plain(child) is None and put_on_state(child) is None
        parts += plain_parts(child, f"{prefix}{name}.") if nested else [(prefix + name, child)]
    return parts


def why_unknown(module: nn.Module) -> str:
    """Say that a module is no nn.Sequential, and what to write instead, where the names of its parts show it."""
    kind = type(module).__name__
    kind = f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    linears = [path for path, part in module.named_modules() if type(part) is nn.Linear]
    if not linears:
        return f"is {kind}, wants an nn.Sequential of {', '.join(known.__name__ for known in _STEPS)}"
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
