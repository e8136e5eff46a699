"""``find_chain``: the operations by which a model makes the logits of an exit, if a fused head does just the same.

From the logits back: a softmax, a linear layer, dropout, an activation and a hidden linear layer, a LayerNorm, a pool.
Each parameter is known by identity, so that the head follows it whatever it becomes; anything else ends the chain.
In between, data movement is looked through where replaying it on labels, in place of numbers, shows that it is that.
"""

from dataclasses import dataclass, field, replace
from math import prod

from torch import Tensor, arange, equal, nn

from ...kernels.reference.hidden_layers import MOST_HIDDEN
from ..heads.head_pattern import pair
from ..listening.hooks import has_hooks
from ..listening.recording import Operation, Value

SOFTMAXES = "_softmax", "_log_softmax"
#: Operators that move elements and compute nothing.
_MOVES = frozenset(
    "view _unsafe_view reshape _reshape_alias flatten squeeze unsqueeze alias detach clone contiguous lift_fresh "
    "expand permute transpose t movedim cat stack unbind select slice split split_with_sizes unsafe_split chunk".split()
)
_SHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias")
#: Operators to look back over.
_MOST = 64


@dataclass
class HeadChain:
    """A head as fused heads know it."""

    linear: nn.Linear
    """The last one."""
    logits: Value
    """What it makes."""
    is_softmax: bool
    """A softmax comes behind it, and not its logarithm."""
    dropout: float = 0.0
    """Before the first linear layer; 0 in eval mode, as is ``hidden_dropout``."""
    hidden: nn.Linear | None = None
    activation: str = ""
    hidden_dropout: float = 0.0
    """Behind the activation."""
    norm: nn.LayerNorm | None = None
    rectified: Value | None = None
    """What a ReLU before the pool reads, if there is one."""
    pool: str = "none"
    pool_size: tuple[int, int] = (1, 1)
    map_size: tuple[int, int] | None = None
    """Of maps, if the pool is one of fixed windows."""
    layout: str | None = None
    reads: list[Value] = field(default_factory=list)
    """What the pool reads: values of the same elements."""
    features: list[Value] = field(default_factory=list)
    """What the pool makes: values of the same elements."""
    operations: list[Operation] = field(default_factory=list)
    """All between what the pool reads and the logits."""

    def without_pool(self) -> "HeadChain":
        """Return the chain behind the pool."""
        return replace(
            self, pool="none", pool_size=(1, 1), map_size=None, layout=None, reads=self.features, rectified=None
        )

    @property
    def form(self) -> tuple[object, ...]:
        """What must be the same in training mode: all but dropout and the softmax."""
        layers = self.linear, self.hidden, self.norm, self.activation
        return (*layers, self.pool, self.pool_size, self.map_size, self.layout)


def find_chain(model: nn.Module, value: Value, foreign: set[Operation]) -> HeadChain | str:
    """Return the chain that makes the logits of an exit, or what ends it: an operation, with the line of code.

    Args:
        model: in which parameters have the names that the recording knows them by.
        value: the logits [N, K], or the softmax of them.
        foreign: operations that other exits depend on, whose layers are the backbone's.
    """
    return _Walk(model, foreign).back_from(value)


class _Walk:
    """Goes back from the logits, operation by operation."""

    def __init__(self, model: nn.Module, foreign: set[Operation]) -> None:
        self._model, self._foreign = model, foreign
        self._passed: list[Operation] = []

    def back_from(self, value: Value) -> HeadChain | str:
        value = self._same(value)
        made_by = value.made_by
        is_softmax = made_by is not None and made_by.name == "_softmax" and made_by.args[1] in (1, -1)
        if made_by is not None and made_by.name in SOFTMAXES and made_by.args[1] in (1, -1):
            value = self._same(self._through(made_by))
        read = self._linear(value)
        if isinstance(read, str):
            return read
        layer, x = read
        chain = HeadChain(layer, value, is_softmax)
        x, chain.dropout = self._dropout(x)
        name, kept = _activation(x), list(self._passed)
        if name is not None and x.made_by is not None:
            below = self._linear(self._through(x.made_by))
            if isinstance(below, str) or below[0].out_features > MOST_HIDDEN:
                self._passed = kept
            else:
                chain.hidden, chain.activation, chain.hidden_dropout = below[0], name, chain.dropout
                x, chain.dropout = self._dropout(below[1])
        self._pool(self._norm(x, chain), chain)
        chain.operations = self._passed
        cut = [str(each) for each in self._passed if each.cuts]
        return f"{cut[-1]} reads what has another gradient than that of what made it" if cut else chain

    def _through(self, operation: Operation) -> Value:
        """Pass an operation, and return what it reads first."""
        self._passed.append(operation)
        return operation.reads[0]

    def _same(self, value: Value) -> Value:
        """Pass data movement that changes nothing but the shape of a row."""
        same = [each for each in same_elements(value) if each.shape[0] == value.shape[0]]
        self._pass_to(value, same[-1])
        return same[-1]

    def _pass_to(self, value: Value, earlier: Value) -> None:
        while value is not earlier:
            assert value.made_by is not None
            value = self._through(value.made_by)

    def _linear(self, value: Value) -> tuple[nn.Linear, Value] | str:
        made_by = value.made_by
        if made_by is None or len(value.shape) != 2:
            return f"its logits {list(value.shape)} are no output of a linear layer"
        bias = None
        if made_by.name == "addmm" and not made_by.kwargs:
            bias, x, weight = made_by.args[:3]
        elif made_by.name == "mm":
            x, weight = made_by.args[:2]
        else:
            return f"{made_by} comes behind its last linear layer"
        if made_by in self._foreign:
            return f"{made_by} is a layer of other exits, too"
        turned = weight.made_by
        if turned is None or turned.name != "t" or turned.reads[0].leaf != "parameter":
            return f"{made_by} multiplies by what is no parameter of an nn.Linear"
        layer = self._owner(turned.reads[0], bias, nn.Linear)
        if not isinstance(layer, nn.Linear):
            return f"{made_by} is not that of a plain nn.Linear of the model"
        self._passed += [made_by, turned]
        return layer, x

    def _owner(self, weight: Value, bias: Value | None, kind: type[nn.Module]) -> nn.Module | None:
        """Return the layer of a kind, and no subclass, that has just these parameters, and nothing of the user's."""
        if any(each is not None and each.written is not None for each in (weight, bias)):  # and so something else later
            return None
        for name in weight.names:
            path, _, last = name.rpartition(".")
            layer = self._model.get_submodule(path)
            own = layer._parameters
            if type(layer) is not kind or last != "weight" or own.get("weight") is not weight.tensor:
                continue
            if own.get("bias") is not (None if bias is None else bias.tensor) or has_hooks(layer):
                continue
            if "forward" not in vars(layer):
                return layer
        return None

    def _dropout(self, x: Value) -> tuple[Value, float]:
        """Pass dropout, also between movements; returns what it reads and its probability."""
        kept, keep = list(self._passed), 1.0
        while True:
            before = self._same(x)
            made_by = before.made_by
            if made_by is not None and made_by.name == "native_dropout":
                x, keep = self._through(made_by), keep * (1.0 - made_by.args[1])
            elif made_by is not None and (mask := _mask_of(made_by)) is not None:
                keep *= mask.args[1]
                self._passed += [made_by, mask]
                x = next(each for each in made_by.reads if each.made_by is not mask)
            elif keep == 1.0:
                self._passed = kept
                return x, 0.0
            else:
                return x, round(1.0 - keep, 12)  # 0.2, and not 1.0 - 0.8
            kept = list(self._passed)

    def _norm(self, x: Value, chain: HeadChain) -> Value:
        made_by = x.made_by
        if made_by is None or made_by.name != "native_layer_norm" or len(x.shape) != 2 or made_by in self._foreign:
            return x
        source, shape, weight, bias, eps = made_by.args[:5]
        layer = None if weight is None else self._owner(weight, bias, nn.LayerNorm)
        if not isinstance(layer, nn.LayerNorm) or list(shape) != [x.shape[-1]] or layer.eps != eps:
            return x
        self._passed.append(made_by)
        chain.norm = layer
        return source

    def _pool(self, x: Value, chain: HeadChain) -> None:
        """Note how the features [N, D] are pooled, and of what."""
        same = [each for each in same_elements(x) if each.shape[0] == x.shape[0]]
        found = _pool_of(same[-1])
        chain.features = [each for each in reversed(same) if 2 <= len(each.shape) <= 4]
        if found is None:
            chain.reads = chain.features
            self._pass_to(x, chain.reads[0])
            return
        self._pass_to(x, same[-1])
        pooled, chain.pool, chain.pool_size, chain.layout, chain.map_size = found
        self._passed.append(same[-1].made_by)  # type: ignore[arg-type]
        whole = same_elements(pooled)[-1]
        other = {("NCL", 4): "NCHW", ("NCHW", 3): "NCL"}.get((chain.layout, len(whole.shape)))
        if (
            other is not None
            and whole.shape[:2] == pooled.shape[:2]
            and chain.pool_size == (1, 1)
            and chain.map_size is None
        ):
            self._pass_to(pooled, whole)  # a map that was flattened for it, or a signal made a map of one row
            pooled, chain.layout = whole, other
        chain.reads = [pooled]
        rectifier = pooled.made_by
        if chain.layout == "NCHW" and rectifier is not None and rectifier.name == "relu":
            chain.rectified = rectifier.reads[0]


def _mask_of(operation: Operation) -> Operation | None:
    """Return the operation that scales the mask of a dropout by which one multiplies; ``args[1]`` is what is kept."""
    if operation.name not in ("mul", "mul_") or len(operation.reads) != 2:
        return None
    for read in operation.reads:
        scaled = read.made_by
        if read.shape != operation.makes[0].shape or read.readers > 1:  # a mask of samples, or of several layers
            continue
        if scaled is not None and scaled.name in ("div_", "div") and isinstance(scaled.args[1], float):
            drawn = scaled.reads[0].made_by
            if drawn is not None and drawn.name in ("bernoulli_", "bernoulli"):
                kept = drawn.args[1] if len(drawn.args) > 1 else 0.5  # the default of its schema
                if kept == scaled.args[1]:
                    return scaled
    return None


def _activation(x: Value) -> str | None:
    made_by = x.made_by
    if made_by is None or len(x.shape) != 2:
        return None
    if made_by.name.rstrip("_") == "gelu":
        return {"none": "gelu", "tanh": "gelu_tanh"}[made_by.kwargs.get("approximate", "none")]
    return made_by.name.rstrip("_") if made_by.name.rstrip("_") in ("relu", "hardswish") else None


def _pool_of(features: Value) -> tuple[Value, str, tuple[int, int], str, tuple[int, int] | None] | None:
    """Return what features [N, D] or [N, C, h, w] are a pool of: pool, size, layout, and the one size of maps."""
    made_by = features.made_by
    if made_by is None or not made_by.reads or features is not made_by.makes[0]:
        return None
    name, args = made_by.name, made_by.args
    x = made_by.reads[0]
    if name in ("mean", "amax", "max") and len(args) > 1 and not made_by.kwargs:
        dims = [args[1]] if isinstance(args[1], int) else list(args[1] or ())
        by_dims = {(4, (2, 3)): "NCHW", (4, (1, 2)): "NHWC", (3, (1,)): "NTD", (3, (2,)): "NCL"}
        layout = by_dims.get((len(x.shape), tuple(sorted(dim % len(x.shape) for dim in dims))))
        return None if layout is None else (x, "avg" if name == "mean" else "max", (1, 1), layout, None)
    if name in ("_adaptive_avg_pool2d", "adaptive_max_pool2d") and len(x.shape) == 4:
        return x, "avg" if "avg" in name else "max", pair(args[1]), "NCHW", None
    if name in ("avg_pool2d", "max_pool2d_with_indices") and len(x.shape) == 4:
        window, stride = pair(args[1]), pair(args[2] if len(args) > 2 and args[2] else args[1])
        padding, dilation = (args[3] if len(args) > 3 else []), (args[4] if len(args) > 4 and name[0] == "m" else [])
        others = any(padding) or any(step != 1 for step in dilation) or len(args) > 6 and args[6] is not None
        rows, columns = (size // step for size, step in zip(x.shape[2:], window, strict=True))
        covered = (rows * window[0], columns * window[1]) == x.shape[2:] and features.shape[2:] == (rows, columns)
        if covered and not others and (window == stride or (rows, columns) == (1, 1)):
            return x, "avg" if "avg" in name else "max", (rows, columns), "NCHW", (x.shape[2], x.shape[3])
    if name == "select" and len(x.shape) == 3 and tuple(args[1:]) == (1, 0):
        return x, "first", (1, 1), "NTD", None
    return None


def is_move(operation: Operation, *, backwards: bool = True) -> bool:
    """Return whether an operation moves elements and computes nothing; nor in what it hands back, as detach does."""
    is_known = operation.name in _MOVES and not isinstance(operation.function, str)
    if not is_known or any(value.dtype != operation.makes[0].dtype for value in operation.reads):
        return False
    return not (backwards and (operation.cuts or operation.name == "detach"))


def same_elements(value: Value, *, backwards: bool = True) -> list[Value]:
    """Return the values that have just the elements of one in the same order, from that one to the earliest."""
    found = [value]
    while (operation := found[-1].made_by) is not None and len(operation.reads) == 1:
        if not is_move(operation, backwards=backwards):
            break
        (source,) = operation.reads
        if prod(source.shape) != prod(value.shape):
            break
        moved = _moved(found[-1], [operation])
        if moved is None or not equal(moved.flatten(), arange(moved.numel())):
            break
        found.append(source)
    return found


def parts_along(value: Value, dim: int) -> list[Value] | None:
    """Return the values that were stacked to make one, along a dimension; None if it was not made so."""
    operations: list[Operation] = []
    _collect(value, operations)
    labels = _moved(value, operations)
    if labels is None:
        return None
    inner = {made for operation in operations for made in operation.makes}
    sources: dict[int, Value] = {}
    start = 0
    for read in dict.fromkeys(read for operation in operations for read in operation.reads if read not in inner):
        sources[start] = read
        start += prod(read.shape)
    parts = []
    for part in labels.unbind(dim):
        source = sources.get(int(part.flatten()[0]))
        if source is None or not equal(part.flatten(), arange(part.numel()) + part.flatten()[0]):
            return None
        if prod(source.shape) != part.numel():
            return None
        parts.append(source)
    return parts


def _collect(value: Value, operations: list[Operation]) -> None:
    made_by = value.made_by
    if made_by is None or made_by in operations or not is_move(made_by, backwards=False) or len(operations) >= _MOST:
        return
    if made_by.name == "detach":
        return
    for read in made_by.reads:
        if read not in made_by.cuts:
            _collect(read, operations)
    operations.append(made_by)


def _moved(value: Value, operations: list[Operation]) -> Tensor | None:
    """Return where the elements of a value come from, numbered through what the operations read from outside."""
    labels: dict[Value, Tensor] = {}
    start = 0
    for operation in operations:
        for read in operation.reads:
            if read not in labels:
                count = prod(read.shape)
                labels[read] = arange(start, start + count).view(read.shape)
                start += count
        if operation.name in _SHAPES:  # the labels may lie in other strides than the numbers did
            made = [labels[operation.reads[0]].reshape(operation.args[1])]
        else:
            made = operation.run(labels)
        labels.update(zip(operation.makes, made, strict=False))
    return labels.get(value)
