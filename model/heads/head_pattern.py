"""Recognises the ``nn.Sequential`` classifiers that a fused head can stand in for, and says why others are none."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ...kernels.launch.head_arguments import ONE_LOGIT, head_dtypes, head_dtypes_in_words
from ...kernels.reference.hidden_layers import MOST_HIDDEN
from ..listening.hooks import put_on_state, why_not_plain
from .head_layers import HiddenStack

POOLS = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
#: Modules that shape features, or may end a head.
SHAPING_MODULES = (*POOLS, nn.AvgPool2d, nn.Flatten, nn.Dropout, nn.Identity, nn.Linear, nn.Softmax)
#: Modules of activations by the names that kernels have for them.
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "gelu": nn.GELU, "gelu_tanh": partial(nn.GELU, approximate="tanh"), "hardswish": nn.Hardswish
}  # fmt: skip
ACTIVATION_MODULES = (nn.ReLU, nn.GELU, nn.Hardswish)
KNOWN_MODULES = (*SHAPING_MODULES, nn.LayerNorm, *ACTIVATION_MODULES)


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
    read = _PatternReader()
    for path, part in plain_parts(module):
        where = f"'{path}' ({type(part).__name__})"
        if (reason := why_not_plain(part)) is not None:
            return f"{where} {reason}, which a fused head would not call"
        if type(part) is nn.Dropout and part.training != module.training:
            return f"{where} is in {'training' if part.training else 'eval'} mode, unlike the classifier"
        if (reason := read.add(path, part)) is not None:
            return f"{where} {reason}"
        if type(part) not in (nn.Linear, nn.LayerNorm) and (reason := put_on_state(part)) is not None:  # those stay
            return f"{where} {reason}, which a fused head would not"
    pattern = read.pattern()
    if isinstance(pattern, str):
        return pattern
    if pattern.linear.out_features == 1:
        return ONE_LOGIT
    weight = pattern.linear.weight
    if weight.dtype not in head_dtypes(weight.device):
        return f"is {weight.dtype}, wants {head_dtypes_in_words(weight.device)}: call its .float(), say"
    if (reason := why_not_plain(module)) is not None:
        return f"{reason}, which a fused head would not call"
    if (reason := put_on_state(module)) is not None:
        return f"{reason}, which a fused head would not"
    return pattern


class _PatternReader:
    """What of a classifier has been read so far."""

    def __init__(self) -> None:
        self._pool, self._pool_size = "none", (1, 1)
        self._map_size: tuple[int, int] | None = None
        self._keep = self._hidden_keep = 1.0
        self._rectifies = self._pooled = self._flattened = self._softmaxed = False
        self._norm: tuple[str, nn.LayerNorm] | None = None
        self._linears: list[tuple[str, nn.Linear]] = []
        self._activation: tuple[str, str] | None = None  # where it is, and its name

    def add(self, path: str, part: nn.Module) -> str | None:
        """Read the next module; returns why it cannot be there, if so."""
        kind = type(part)
        if kind is nn.Identity:
            return None
        if self._softmaxed:
            return "follows the Softmax: only Identity may"
        if kind in ACTIVATION_MODULES and self._activation is not None:
            return f"is a second activation after {self._activation[0]}: a fused head has one at most"
        if len(self._linears) == 2 and kind is not nn.Softmax:
            return "follows the Linear: only Softmax and Identity may"
        if len(self._linears) == 1 and self._activation is None and kind not in (*ACTIVATION_MODULES, nn.Softmax):
            return "follows the Linear: only Softmax, Identity and an activation may"
        readers: dict[type, Callable[[str, Any], str | None]] = {
            nn.AdaptiveAvgPool2d: self._adaptive_pool,
            nn.AdaptiveMaxPool2d: self._adaptive_pool,
            nn.AvgPool2d: self._fixed_pool,
            nn.Flatten: self._flatten,
            nn.Dropout: self._dropout,
            nn.LayerNorm: self._layer_norm,
            nn.Linear: self._linear,
            nn.Softmax: self._softmax,
            **dict.fromkeys(ACTIVATION_MODULES, self._activates),
        }
        reader = readers.get(kind)
        if reader is None:
            return f"is none of {', '.join(known.__name__ for known in KNOWN_MODULES)}"
        return reader(path, part)

    def pattern(self) -> HeadPattern | str:
        """Return what was read as a pattern, or why it is none."""
        if not self._linears:
            return "has no Linear"
        if self._activation is not None and len(self._linears) == 1:
            return f"{self._activation[0]} follows the last Linear: only Softmax and Identity may"
        *hidden, (path, linear) = self._linears
        paths = {"linear": path}
        first = hidden[0][1] if hidden else linear
        if self._norm is not None:
            where, norm = self._norm
            if norm.normalized_shape != (first.in_features,):
                got = list(norm.normalized_shape)
                return f"'{where}' (LayerNorm) is over {got}, not over all {first.in_features} features of a sample"
            paths["hidden.norm"] = where
        if hidden:
            paths["hidden.linear"] = hidden[0][0]
            if first.out_features > MOST_HIDDEN:
                its = f"'{hidden[0][0]}' (Linear) has {first.out_features:,} hidden features"
                return f"{its}, wants at most {MOST_HIDDEN:,}"
        return HeadPattern(
            self._pool,
            self._pool_size,
            self._map_size,
            1.0 - self._keep,
            linear,
            paths,
            rectifies=self._rectifies,
            norm=None if self._norm is None else self._norm[1],
            hidden=hidden[0][1] if hidden else None,
            activation="relu" if self._activation is None else self._activation[1],
            hidden_dropout=1.0 - self._hidden_keep,
        )

    def _pools(self, pool: str, size: tuple[int, int]) -> str | None:
        if self._pooled or self._flattened or self._keep != 1.0 or self._norm is not None or self._linears:
            return "is not the first of pool, Flatten and Dropout"
        self._pool, self._pool_size, self._pooled = pool, size, True
        return None

    def _adaptive_pool(self, _path: str, part: nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d) -> str | None:
        if isinstance(part, nn.AdaptiveMaxPool2d) and part.return_indices:
            return "returns indices too"
        size: Any = part.output_size
        pair = (size, size) if isinstance(size, int) else tuple(size)
        if None in pair:
            return "takes a size of its grid from the input"
        return self._pools("avg" if isinstance(part, nn.AdaptiveAvgPool2d) else "max", pair)

    def _fixed_pool(self, _path: str, part: nn.AvgPool2d) -> str | None:
        window, stride, padding = (_pair(size) for size in (part.kernel_size, part.stride, part.padding))
        if stride != window or padding != (0, 0) or part.divisor_override is not None:
            return "strides, pads or divides otherwise than by its window, which is to be the whole map"
        self._map_size = window
        return self._pools("avg", (1, 1))

    def _flatten(self, _path: str, part: nn.Flatten) -> str | None:
        if (part.start_dim, part.end_dim) != (1, -1):
            return f"flattens dimensions {part.start_dim} to {part.end_dim}, not 1 to -1"
        if self._norm is not None or self._linears:
            return f"follows the {'Linear' if self._linears else 'LayerNorm'}, which reads vectors"
        self._flattened = True
        return None

    def _dropout(self, _path: str, part: nn.Dropout) -> str | None:
        if self._linears:
            self._hidden_keep *= 1.0 - part.p
        else:
            self._keep *= 1.0 - part.p
        return None

    def _layer_norm(self, path: str, part: nn.LayerNorm) -> str | None:
        if self._pooled and not self._flattened:
            return "follows a pool without a Flatten between them"
        if self._norm is not None or self._linears or self._keep != 1.0:
            return "is not the first of LayerNorm, Dropout and Linear"
        self._norm = path, part
        return None

    def _linear(self, path: str, part: nn.Linear) -> str | None:
        if self._pooled and not self._flattened:
            return "follows a pool without a Flatten between them"
        self._linears.append((path, part))
        return None

    def _activates(self, path: str, part: nn.Module) -> str | None:
        name = activation_of(part)
        if name is None:
            return "approximates otherwise than by 'none' or 'tanh'"
        if self._linears:
            self._activation = f"'{path}' ({type(part).__name__})", name
            return None
        if name != "relu" or self._pooled or self._flattened or self._keep != 1.0 or self._norm is not None:
            return "is neither a ReLU before pool and Flatten nor an activation between two Linears"
        if isinstance(part, nn.ReLU) and part.inplace:
            return "changes in place what other layers may read, wants inplace=False"
        self._rectifies = True
        return None

    def _softmax(self, _path: str, part: nn.Softmax) -> str | None:
        if not self._linears or (self._activation is not None and len(self._linears) == 1):
            return "comes before the Linear"
        if part.dim not in (1, -1, None):
            return f"normalises dimension {part.dim}, not the classes"
        self._softmaxed = True
        return None


def _pair(size: int | tuple[int, ...]) -> tuple[int, int]:
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
