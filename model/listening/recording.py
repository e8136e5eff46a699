"""``Recording``: one forward of a model as operations on values, and the calls of its layers.

A value is what a tensor was between two writes to its memory: an operation reads values and makes new ones, also where
it writes in place. What follows from a recording holds for whatever numbers the values have, as long as the same
operations run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ...kernels.launch.check_arguments import head_dtypes
from ..basics.arguments import is_plain
from .reading import part_of

#: Leaves that outlive a forward.
STATE = ("parameter", "buffer", "attribute")


@dataclass(eq=False, repr=False)
class Value:
    """What one tensor was, until its memory was written to again."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: int | None = None
    """Tells where it lies; None for one without memory of its own."""
    stride: tuple[int, ...] = ()
    """Of one with memory."""
    made_by: "Operation | None" = None
    leaf: str = ""
    """What it is if no operation made it: input, mask, parameter, buffer, attribute, constant or unknown."""
    names: list[str] = field(default_factory=list)
    """Of a leaf, all that it has in the model; of an input, that of the argument."""
    tensor: Tensor | None = None
    """Of a parameter or a buffer, the very one; of an unknown leaf, a copy."""
    is_readable: bool = False
    """Heads have kernels for its type on its device, and its memory is plain."""
    from_input: bool = False
    """It depends on the input."""
    from_state: bool = False
    """It depends on a parameter or a buffer, and so on what those become."""
    learns: bool = False
    """It would have a gradient, by what it was made of; known of forwards with gradients."""
    readers: int = 0
    """How many operations read it."""
    written: int | None = None
    """The number of the first operation that wrote to its memory later."""

    def feeds_head(self, samples: int) -> bool:
        """Return whether a head could read it, were it what a layer returns for so many samples."""
        return self.is_readable and 2 <= len(self.shape) <= 4 and self.shape[0] == samples and 0 not in self.shape


@dataclass(eq=False, repr=False)
class Operation:
    """One run of an operator."""

    number: int
    function: Any
    args: tuple[Any, ...]
    """With values in place of tensors, as in ``kwargs``."""
    kwargs: dict[str, Any]
    reads: list[Value]
    calls: tuple["Call", ...]
    """The calls of layers within which it ran, from the outermost to the innermost."""
    line: str
    """File and line of the user's code."""
    makes: list[Value] = field(default_factory=list)
    cuts: list[Value] = field(default_factory=list)
    """What it reads with another gradient than that of the operators that made it: made under ``no_grad`` or by an
    autograd.Function of the user's, or with a hook; known of forwards with gradients."""
    changes: list[Value] = field(default_factory=list)
    """The parameters, buffers and attributes to whose memory it writes."""
    is_random: bool = False
    flops: int = 0

    @property
    def name(self) -> str:
        """Its operator, without the overload."""
        packet = getattr(self.function, "overloadpacket", None)
        return str(self.function) if packet is None else str(packet.__name__)

    def run(self, tensors: Mapping["Value", Tensor]) -> list[Tensor]:
        """Run its operator on other tensors in place of the values that it read, and return those that it makes."""
        args, kwargs = tree_map(
            lambda each: tensors[each] if isinstance(each, Value) else each, (self.args, self.kwargs)
        )
        return [each for each in tree_leaves(self.function(*args, **kwargs)) if isinstance(each, Tensor)]

    @property
    def is_view(self) -> bool:
        """It computes nothing, and makes another view of what it reads."""
        return bool(getattr(self.function, "is_view", False))

    def __str__(self) -> str:
        return f"{self.name} at {self.line}"


@dataclass(eq=False, repr=False)
class Call:
    """One call of a layer."""

    layer: nn.Module
    name: str
    """The shortest that it has in the model; "" for the model itself, None for a layer that is not registered."""
    began: int
    """How many operations had run."""
    args: tuple[Any, ...]
    """With values in place of tensors, as in ``kwargs``."""
    kwargs: dict[str, Any]
    autocasts: bool = False
    """It runs under an autocast that the model has entered, or outside of one that it has left."""
    ended: int = -1
    order: int = -1
    """Its place among the ends of all calls."""
    returned: dict[tuple[Any, ...], Value] = field(default_factory=dict)
    """The tensors in its output by their places: see :func:`places`."""


class HostRead(NamedTuple):
    """A number that the host read: what follows may depend on it, unseen."""

    how: str
    value: Value
    line: str


@dataclass(repr=False)
class Recording:
    """One forward: see :func:`record`."""

    operations: list[Operation]
    calls: list[Call]
    """In the order of their ends; without those that raised."""
    host_reads: list[HostRead]
    """Those of numbers that depend on the input or on chance, or on parameters and buffers."""
    draws: bool
    """It has drawn numbers from Python's or NumPy's generator, unseen."""
    replaced: list[str]
    """Parameters and buffers in whose place it has put other tensors, which depend on the input or on such."""
    output: Any
    """What the model returned."""
    returned: dict[tuple[Any, ...], Value]
    """The tensors in that by their places: see :func:`places`."""
    cuts: list[Value]
    """Of those, the ones with another gradient than that of the operators that made them: see :class:`Operation`."""
    samples: int
    outputs: dict[nn.Module, Any]
    """What each layer returned last; of forwards without gradients."""


class RecordedPair(NamedTuple):
    """Two recordings of the same operations, for other numbers of samples."""

    first: Recording
    second: Recording


def ancestors(value: Value) -> set[Operation]:
    """Return all operations that a value depends on."""
    found: set[Operation] = set()
    todo = [value]
    while todo:
        made_by = todo.pop().made_by
        if made_by is not None and made_by not in found:
            found.add(made_by)
            todo += made_by.reads
    return found


def places(output: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what is in lists, tuples, dicts, dataclasses or one object, by the indices, keys and fields to it."""
    parts: Any = None
    if isinstance(output, Mapping):
        parts = output.items()
    elif isinstance(output, (list, tuple)):
        parts = enumerate(output)
    elif is_dataclass(output) and not isinstance(output, type):
        parts = ((each.name, getattr(output, each.name)) for each in fields(output))
    elif not at and not isinstance(output, Tensor):
        parts = getattr(output, "__dict__", {}).items()
    if parts is None:
        yield at, output
    else:
        for key, part in parts:
            yield from places(part, (*at, key))


def at_place(output: Any, place: tuple[Any, ...]) -> Any:
    """Return what :func:`places` calls by that place."""
    for key in place:
        output = part_of(output, key)
    return output


def shortest(names: list[str]) -> str:
    """Return the name with the fewest dots, and of those the shortest."""
    return min(names, key=lambda name: (name.count("."), len(name)))


#: Batch norms, whose schemas do not say that in training mode they write running statistics, their arguments 3 and 4.
BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm")
#: Attention in one operator, one of which each device takes. PyTorch's own counter passes over that of the CPU, and
#: fails where several heads of queries share one of keys.
_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}")
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)


class OperatorMode(TorchDispatchMode):
    """The base of dispatch modes here: layers that are compiled run compiled, unless they are told to run eagerly."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled layers run as they would without the mode."""
        return True


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is no subclass, and is known by where it lies and in which strides."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_plain(tensor) and not wrapped and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def value_like(tensor: "Tensor | Value", number: int = -1, **known: Any) -> Value:
    """Return a value of which is known what a tensor shows, or another value, and what is given."""
    if isinstance(tensor, Value):
        shown = {name: getattr(tensor, name) for name in ("shape", "dtype", "memory", "stride", "is_readable")}
    else:
        has_shape = not (is_lazy(tensor) or tensor.is_nested)
        shown = {"shape": tuple(tensor.shape) if has_shape else (), "dtype": tensor.dtype}
        if has_memory(tensor):
            shown |= {"memory": tensor.untyped_storage()._cdata, "stride": tensor.stride()}
            shown["is_readable"] = tensor.dtype in head_dtypes(tensor.device)
    return Value(number, **shown, **known)


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operator writes to, but for those without memory of their own to compare."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    is_norm = func.overloadpacket.__name__ in BATCH_NORMS
    if not (func._schema.is_mutable or is_norm):
        return []
    arguments = func._schema.arguments if func._schema.is_mutable else []
    given = dict(zip((each.name for each in arguments), args, strict=False)) | dict(kwargs)
    written = [given.get(each.name) for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    if is_norm and len(args) > 5 and args[5]:
        written += args[3:5]
    return [tensor for tensor in tree_leaves(written) if is_plain(tensor)]


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int:
    """Return the work of an operator: that of convolutions, products and attention."""
    if func.overloadpacket in _ATTENTION:
        query, key, value = args[:3]  # [N, heads, tokens, width]
        samples, heads, tokens, width = query.shape
        return 2 * samples * heads * tokens * key.shape[2] * (width + value.shape[3])
    count: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=output)
