"""``record``: one forward of a model as operations on values, with the calls of its layers.

A value is what a tensor was between two writes to its memory: an operation reads values and makes new ones, also where
it writes in place. A tensor is known by where it lies and in which strides, since Python objects do not stay the same.
What follows from a recording holds for whatever numbers the values have, as long as the same operations run.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ...kernels.head_arguments import head_dtypes
from ..arguments import is_plain
from ..bad_input import BadInput
from ..batches import Batch, call_with, first_tensor, map_tensors
from ..dry_run import written_tensors
from ..hooks import ThreadHook
from ..reading import part_of

#: Attention in one operator, one of which each device takes. PyTorch's own counter passes over that of the CPU, and
#: fails where several heads of queries share one of keys.
_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}")
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
)
#: Batch norms, whose schemas do not say that in training mode they write running statistics, their arguments 3 and 4.
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm")
#: Operators whose answer, or the shape of it, the host waits for.
_HOST_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
#: Functions of tensors by which numbers leave PyTorch unseen by its dispatcher.
_READS = ("numpy", "tolist", "__array__", "__dlpack__", "__cuda_array_interface__", "data_ptr", "untyped_storage")


@dataclass(eq=False, repr=False)
class Value:
    """What one tensor was, until its memory was written to again."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    made_by: "Operation | None" = None
    leaf: str = ""
    """What it is if no operation made it: input, parameter, buffer, attribute, constant or unknown."""
    names: list[str] = field(default_factory=list)
    """Of a leaf, all that it has in the model."""
    tensor: Tensor | None = None
    """Of a parameter or a buffer, the very one; of an unknown leaf, a copy."""
    is_readable: bool = False
    """Heads have kernels for its type on its device, and its memory is plain."""
    from_input: bool = False
    """It depends on the input."""
    from_state: bool = False
    """It depends on a parameter or a buffer, and so on what those become."""
    readers: int = 0
    """How many operations read it."""
    written: int | None = None
    """The number of the first operation that wrote to its memory later."""


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
    is_random: bool = False
    is_opaque: bool = False
    """Nobody can tell what it does: its tensors were made where nothing was seen."""
    is_without_gradient: bool = False
    """With gradients it runs without them all the same: under ``no_grad``, or in an autograd.Function."""
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

    def __str__(self) -> str:
        return f"{self.name} at {self.line}"


@dataclass(eq=False, repr=False)
class Call:
    """One call of a layer."""

    layer: nn.Module
    name: str
    """The shortest that it has in the model; "" for the model itself, None for a layer that is not registered."""
    is_registered: bool
    began: int
    """How many operations had run."""
    args: tuple[Any, ...]
    """With values in place of tensors, as in ``kwargs``."""
    kwargs: dict[str, Any]
    ended: int = -1
    order: int = -1
    """Its place among the ends of all calls."""
    returned: dict[tuple[Any, ...], Value] = field(default_factory=dict)
    """The tensors in its output by their places: see :func:`places`."""

    def holds(self, operation: Operation) -> bool:
        """Return whether an operation ran within the call."""
        return self in operation.calls


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
    """Those of numbers that depend on the input, or on parameters and buffers."""
    output: Any
    """What the model returned."""
    returned: dict[tuple[Any, ...], Value]
    """The tensors in that by their places: see :func:`places`."""
    samples: int

    def calls_of(self, layer: nn.Module) -> list[Call]:
        """Return the calls of one layer."""
        return [call for call in self.calls if call.layer is layer]


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
    """Yield what is in lists, tuples, dicts and dataclasses, with the indices, keys and fields that lead to it."""
    parts: Any = None
    if isinstance(output, Mapping):
        parts = output.items()
    elif isinstance(output, (list, tuple)):
        parts = enumerate(output)
    elif is_dataclass(output) and not isinstance(output, type):
        parts = ((each.name, getattr(output, each.name)) for each in fields(output))
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


def record(
    model: nn.Module,
    example: Batch,
    *,
    watch_host: bool = False,
    with_gradients: bool = False,
    originals: frozenset[nn.Module] = frozenset(),
) -> Recording:
    """Run a model once as it is, and note what runs; buffers and random states are put back.

    Args:
        model: whose layers are hooked meanwhile; one that others run wants a copy (:func:`shallow_copy`).
        example: a batch for it, which stays as it is.
        watch_host: also see numbers that leave PyTorch by ``numpy()`` and the like. Under that watch
            nn.MultiheadAttention takes its parts one by one, in place of one operator.
        with_gradients: run it as in training, and note what runs without gradients all the same.
        originals: layers that must not run: the model is a copy, and they are those that it is a copy of.

    Raises:
        ValueError: one of ``originals`` ran.
    """
    recorder = _Recorder(model, originals, with_gradients)
    with ExitStack() as stack:
        for buffer in (each for each in {*model.buffers()} if not each.is_meta):
            stack.callback(_put_back, buffer, buffer.detach().clone())
        device = first_tensor(example).device
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"))
        begin, end = ThreadHook(recorder.begin), ThreadHook(recorder.end)
        for module in model.modules():  # around hooks of the module's own, which may change what it gets and returns
            if not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(end).remove)
        stack.callback(register_module_forward_pre_hook(ThreadHook(recorder.begin_unregistered)).remove)
        stack.callback(register_module_forward_hook(ThreadHook(recorder.end_unregistered)).remove)
        stack.enter_context(torch.inference_mode(False))  # in which operators would not be taken apart
        stack.enter_context(torch.set_grad_enabled(with_gradients))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        batch = map_tensors(example, torch.clone)  # which the model may change in place
        recorder.take(tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch), "input")
        if watch_host:
            stack.enter_context(_HostReads(recorder))
        stack.enter_context(recorder)
        output = call_with(model, batch)
        with recorder.unwatched():
            returned = recorder.returned(output)
    reads = [read for read in recorder.host_reads if read.value.from_input or read.value.from_state]
    return Recording(recorder.operations, recorder.calls, reads, output, returned, first_tensor(example).shape[0])


def _put_back(buffer: Tensor, before: Tensor) -> None:
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        if not torch.equal(buffer.nan_to_num(), before.nan_to_num()):  # else another thread may be reading it
            buffer.copy_(before)


@dataclass(repr=False)
class _Memory:
    """What is known of one storage."""

    keeps: Any
    """The storage itself: memory that was freed would be taken for what lay there before."""
    version: int = 0
    values: dict[Any, tuple[Value, int]] = field(default_factory=dict)
    """By form (offset, shape, strides and dtype): the value, and the version in which it was made."""
    views: dict[Any, tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    """By form: the form that it is a view of, and the operator that makes it, its first tensor left out."""
    written: list[Value] = field(default_factory=list)


_BASE = object()  # stands for the tensor that a view is made of


class _Recorder(TorchDispatchMode):
    """Notes operators, as a dispatch mode, and calls of layers, as hooks."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See what compiled layers run, which are told to run eagerly."""
        return True

    def __init__(self, model: nn.Module, originals: frozenset[nn.Module], with_gradients: bool) -> None:
        super().__init__()
        self._with_gradients = with_gradients
        self.operations: list[Operation] = []
        self.calls: list[Call] = []
        self.host_reads: list[HostRead] = []
        self.quiet = 0
        self._values = 0
        self._memory: dict[Any, _Memory] = {}
        self._open: list[Call] = []
        # Detached tensors lie where those do that they are detached from, and in the same form.
        self._detached: dict[int, tuple[Tensor, Value]] = {}
        self._originals = originals
        self._names: defaultdict[nn.Module, list[str]] = defaultdict(list)
        for name, layer in model.named_modules(remove_duplicate=False):
            self._names[layer].append(name)
            for key, attribute in vars(layer).items():
                self.take([attribute], "attribute", f"{name}.{key}".strip("."))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.take([parameter], "parameter", name)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self.take([buffer], "buffer", name)

    def unwatched(self) -> "_Quiet":
        """While open, nothing is noted: what runs is the recorder's own."""
        return _Quiet(self)

    # Values

    def take(self, tensors: list[Any], leaf: str, name: str = "") -> None:
        """Note tensors that are there before the forward; one that is known gets another name."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                memory, form = self._memory_of(tensor), _form(tensor)
                if form not in memory.values:
                    memory.values[form] = (
                        self._new(
                            tensor, leaf=leaf, from_input=leaf == "input", from_state=leaf in ("parameter", "buffer")
                        ),
                        memory.version,
                    )
                    memory.values[form][0].tensor = tensor if leaf in ("parameter", "buffer") else None
                memory.values[form][0].names.append(name)

    def with_values(self, parts: Any) -> Any:
        """Return lists, dicts and the like with values in place of tensors."""
        return tree_map(lambda each: self.value(each) if isinstance(each, Tensor) else each, parts)

    def returned(self, output: Any) -> dict[tuple[Any, ...], Value]:
        """Return the tensors in an output as values, by their places."""
        return {place: self.value(each) for place, each in places(output) if isinstance(each, Tensor)}

    def value(self, tensor: Tensor) -> Value:
        """Return what a tensor is now."""
        if id(tensor) in self._detached:
            return self._detached[id(tensor)][1]
        memory, form = self._memory_of(tensor), _form(tensor)
        return self._value_in(memory, form, tensor)

    def _value_in(self, memory: _Memory, form: Any, tensor: Tensor | Value) -> Value:
        known = memory.values.get(form)
        if known is not None and known[1] == memory.version:
            return known[0]
        if known is None and not memory.values:
            value = self._new(tensor, leaf="unknown")
            value.tensor = tensor.detach().clone() if isinstance(tensor, Tensor) else None
        elif form in memory.views:  # of what has been written to since: the same view of what is there now
            base_form, function, args, kwargs = memory.views[form]
            base = self._value_in(memory, base_form, memory.values[base_form][0])
            args = tuple(base if each is _BASE else each for each in args)
            value = self._add(function, args, kwargs, [tensor]).makes[0]
        else:  # other views of it were written to: it depends on all of them
            now = [value for value, version in memory.values.values() if version == memory.version]
            args = tuple(dict.fromkeys([*([] if known is None else [known[0]]), *now, *memory.written]))
            value = self._add("alias", args, {}, [tensor]).makes[0]
        memory.values[form] = (value, memory.version)
        return value

    def _memory_of(self, tensor: Tensor) -> _Memory:
        key: Any = ("object", id(tensor))
        keeps: Any = tensor
        if _has_memory(tensor):
            keeps = tensor.untyped_storage()
            key = keeps._cdata
        return self._memory.setdefault(key, _Memory(keeps))

    def _new(self, tensor: Tensor | Value, **known: Any) -> Value:
        self._values += 1
        readable = tensor.is_readable if isinstance(tensor, Value) else _is_readable(tensor)
        return Value(self._values - 1, tuple(tensor.shape), tensor.dtype, is_readable=readable, **known)

    def _add(self, function: Any, args: Any, kwargs: Any, outputs: list[Any]) -> Operation:
        reads = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Value)]
        operation = Operation(
            len(self.operations), function, args, kwargs, reads, tuple(self._open), line_of_the_user()
        )
        self.operations.append(operation)
        operation.is_without_gradient = self._with_gradients and not torch.is_grad_enabled()
        known = {each: any(getattr(value, each) for value in reads) for each in ("from_input", "from_state")}
        operation.makes = [self._new(each, made_by=operation, **known) for each in outputs]
        for value in reads:
            value.readers += 1
        return operation

    # Operators

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it reads and makes."""
        if self.quiet:
            return func(*args, **(kwargs or {}))
        with self.unwatched():
            return self._run(func, tuple(args), dict(kwargs or {}))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        before = [(self._memory_of(each), _form(each)) for each in given]
        read_args, read_kwargs = self.with_values(args), self.with_values(kwargs)
        output = func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            made = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
            operation = self._add(func, read_args, read_kwargs, made)
            operation.is_opaque = True
            for tensor, value in zip(made, operation.makes, strict=True):
                self._set(tensor, value)
            return output
        if func is torch.ops.aten.lift_fresh.default and read_args[0].leaf == "unknown":
            read_args[0].leaf = "constant"
        written = _written(func, args, kwargs)
        made = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        fresh = [each for each in made if not any(each is other for other in written)]
        operation = self._add(func, read_args, read_kwargs, [*fresh, *written])
        operation.is_random = _is_random(func, args, kwargs)
        operation.flops = _flops(func, args, kwargs, output)
        if operation.reads and any(tag in func.tags for tag in _HOST_READS):
            self.host_reads.append(HostRead(operation.name, operation.reads[0], operation.line))
        for tensor, value in zip(fresh, operation.makes, strict=False):
            if operation.name == "detach":
                self._detached[id(tensor)] = (tensor, value)
                continue
            memory, form = self._memory_of(tensor), _form(tensor)
            base = next((its for its_memory, its in before if its_memory is memory), None)
            if base is not None and base != form:
                first = next(index for index, each in enumerate(args) if isinstance(each, Tensor))
                view = tuple(_BASE if index == first else each for index, each in enumerate(read_args))
                memory.views[form] = (base, func, view, read_kwargs)
            memory.values[form] = (value, memory.version)
        for tensor, value in zip(written, operation.makes[len(fresh) :], strict=True):
            memory = self._memory_of(tensor)
            for old, _ in memory.values.values():
                old.written = operation.number if old.written is None else old.written
            memory.version += 1
            memory.values[_form(tensor)] = (value, memory.version)
            memory.written.append(value)
        return output

    def _set(self, tensor: Tensor, value: Value) -> None:
        memory = self._memory_of(tensor)
        memory.values[_form(tensor)] = (value, memory.version)

    def read_by_host(self, how: str, tensor: Tensor) -> None:
        """Note that numbers of a tensor leave PyTorch."""
        with self.unwatched():
            self.host_reads.append(HostRead(how, self.value(tensor), line_of_the_user()))

    # Layers

    def begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a layer is called: a forward pre-hook of all layers."""
        if self.quiet:
            return
        if layer in self._originals:
            raise BadInput(
                f"model: at {line_of_the_user()} it calls a {type(layer).__name__} by a reference that a copy of the "
                "model keeps to the original's; wants layers as attributes, or in an nn.ModuleList or nn.ModuleDict"
            )
        with self.unwatched():
            names = self._names.get(layer)
            if names is None:
                names = self._names[layer] = []
                for name, parameter in layer.named_parameters():
                    self.take([parameter], "parameter", name)
                for name, buffer in layer.named_buffers():
                    self.take([buffer], "buffer", name)
            name = shortest(names) if names else ""
            call = Call(
                layer, name, bool(names), len(self.operations), self.with_values(args), self.with_values(kwargs)
            )
            self._open.append(call)

    def end(self, layer: nn.Module, _inputs: Any, output: Any) -> None:
        """Note that a layer of the model returns: a forward hook behind those of its own."""
        if self.quiet:
            return
        with self.unwatched():
            while self._open[-1].layer is not layer:  # calls that were left by an exception
                self._open.pop()
            call = self._open.pop()
            for _, tensor in places(output):
                if isinstance(tensor, Tensor) and not self._memory_of(tensor).values:  # made where nothing is seen
                    given = [each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Value)]
                    operation = self._add(f"a {type(layer).__name__}", tuple(given), {}, [tensor])
                    operation.is_opaque = True
                    self._set(tensor, operation.makes[0])
            call.returned = self.returned(output)
            call.ended, call.order = len(self.operations), len(self.calls)
            self.calls.append(call)

    def begin_unregistered(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Note that a layer that is not registered in the model is called: a forward pre-hook of all layers."""
        if not self._names.get(layer):
            self.begin(layer, args, {})

    def end_unregistered(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        """Note that a layer that is not registered in the model returns: a forward hook of all layers."""
        if not self._names.get(layer):
            self.end(layer, inputs, output)


class _Quiet:
    """A part of the recorder's own, in which it notes nothing."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.quiet += 1

    def __exit__(self, *_: object) -> None:
        self._recorder.quiet -= 1


class _HostReads(TorchFunctionMode):
    """Sees the functions by which numbers leave PyTorch."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a read, and go on."""
        name = getattr(func, "__name__", "")
        if not self._recorder.quiet and args and isinstance(args[0], Tensor):
            if name in _READS:
                self._recorder.read_by_host(f"{name}()", args[0])
            elif name == "__set__" and getattr(getattr(func, "__self__", None), "__name__", "") == "data":
                self._recorder.read_by_host(".data =", args[0])
        return func(*args, **(kwargs or {}))


def _has_memory(tensor: Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return is_plain(tensor) and not wrapped and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def _is_readable(tensor: Tensor) -> bool:
    return _has_memory(tensor) and tensor.dtype in head_dtypes(tensor.device)


def _form(tensor: Tensor) -> Any:
    if not _has_memory(tensor):
        return "object"
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found = written_tensors(func, args, kwargs)
    if func.overloadpacket.__name__ in _BATCH_NORMS and len(args) > 5 and args[5]:
        found += [each for each in args[3:5] if isinstance(each, Tensor)]
    return found


def _is_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws numbers: attention is tagged so even where it drops nothing."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    schema = func._schema.arguments
    given = {each.name: each.default_value for each in schema if each.has_default_value()}
    given |= dict(zip((each.name for each in schema), args, strict=False)) | dict(kwargs)
    return given.get("dropout_p", 1.0) != 0.0


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> int:
    if func.overloadpacket in _ATTENTION:
        query, key, value = args[:3]  # [N, heads, tokens, width]
        samples, heads, tokens, width = query.shape
        return 2 * samples * heads * tokens * key.shape[2] * (width + value.shape[3])
    count: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=output)


#: Folders whose code is not the user's: PyTorch's, and this package's.
_NOT_THE_USERS = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)


def line_of_the_user() -> str:
    """Return file and line of the innermost running code that is neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def shortest(names: list[str]) -> str:
    """Return the name with the fewest dots, and of those the shortest."""
    return min(names, key=lambda name: (name.count("."), len(name)))
