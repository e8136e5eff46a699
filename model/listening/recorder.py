"""``record``: notes one forward of a model as operations on values, with the calls of its layers.

A tensor is known by where it lies and in which strides, since Python objects do not stay the same.
"""

import copy
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..basics.bad_input import BadInput
from ..basics.whose_code import Owner, frames_from, line_of
from .batches import Batch, argument_names, arguments_in, call_with, first_tensor, map_tensors
from .hooks import ThreadHook
from .kept import generators, kept
from .reading import PADDING, TOKENS
from .recording import (
    BATCH_NORMS,
    STATE,
    Call,
    HostRead,
    Operation,
    OperatorMode,
    Recording,
    Value,
    ancestors,
    at_place,
    flops_of,
    has_memory,
    places,
    shortest,
    value_like,
    written_tensors,
)

#: Operators whose answer, or the shape of it, the host waits for.
_HOST_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
#: Functions of tensors by which numbers leave PyTorch unseen by its dispatcher.
_READS = ("numpy", "tolist", "__array__", "__dlpack__", "__cuda_array_interface__", "data_ptr", "untyped_storage")


def record(
    model: nn.Module,
    example: Batch,
    *,
    evaluating: bool = False,
    watch_host: bool = True,
    with_gradients: bool = False,
    originals: frozenset[nn.Module] = frozenset(),
    lines: bool = False,
    call: Callable[[Any], Any] | None = None,
) -> Recording:
    """Run a model once as it is, and note what runs; what that changes is put back: see :func:`kept`.

    Args:
        model: whose layers are hooked meanwhile; one that others run wants a copy (:func:`shallow_copy`).
        example: a batch for it, which stays as it is.
        evaluating: put it into eval mode meanwhile.
        watch_host: also see numbers that leave PyTorch by ``numpy()`` and the like. Under that watch
            nn.MultiheadAttention takes its parts one by one, in place of an operator of which nobody can tell the
            FLOPs, and that some devices alone have; see :func:`may_nest`.
        with_gradients: run it as in training, and note where they do not go the way of the operators.
        originals: layers that must not run: the model is a copy, and they are those that it is a copy of.
        lines: note of each operation the line of the user's code, which takes a walk of the stack.
        call: runs the model on a batch; None is its forward.

    Raises:
        ValueError: one of ``originals`` ran.
    """
    recorder = _Recorder(model, originals, lines=lines)
    with ExitStack() as stack:
        stack.enter_context(kept(model, first_tensor(example).device))
        if evaluating:
            model.eval()
        begin, end = ThreadHook(recorder.begin), ThreadHook(recorder.end)
        for module in model.modules():  # around hooks of the module's own, which may change what it gets and returns
            if not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(end).remove)
        stack.callback(register_module_forward_pre_hook(begin).remove)
        stack.callback(register_module_forward_hook(ThreadHook(partial(recorder.end, registered=False))).remove)
        stack.enter_context(torch.inference_mode(False))  # in which operators would not be taken apart
        stack.enter_context(torch.set_grad_enabled(with_gradients))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        batch = map_tensors(example, _learning if with_gradients else torch.clone)  # which it may change in place
        if not isinstance(batch, Tensor):  # what tells padding says nothing of the samples
            for name, each in arguments_in(batch, argument_names(model)).items():
                recorder.take([each], "mask" if str(name).endswith((TOKENS, PADDING)) else "input", str(name))
        recorder.take(tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch), "input")
        if watch_host:
            stack.enter_context(_HostReads(recorder))
        stack.enter_context(recorder)
        drawn = pickle.dumps(generators())
        plain = ((name, each) for name, each in model.named_modules() if not isinstance(each, torch.jit.ScriptModule))
        of_layers = [(name, held) for name, each in plain for held in (each._parameters, each._buffers)]
        state = [(f"{name}.{key}".strip("."), held, key, held[key]) for name, held in of_layers for key in held]
        output = call_with(model, batch) if call is None else call(batch)
        draws = drawn != pickle.dumps(generators())
        with recorder.unwatched():
            returned = recorder.returned(output)
            tensors = {value: at_place(output, place) for place, value in returned.items()}
            cuts = [value for value, tensor in tensors.items() if _is_cut(value, tensor)]
            now = [(name, held.get(key)) for name, held, key, each in state if held.get(key) is not each is not None]
            values = [(name, recorder.value(each)) for name, each in now if each is not None]
            replaced = [name for name, value in values if value.from_input or value.from_state]
            for operation, value, tensor in recorder.read:  # a hook may have been put on it when it had been read
                if tensor._backward_hooks and not tensor.is_leaf and value not in operation.cuts:
                    operation.cuts.append(value)
    if not any(tensor.requires_grad for tensor in tensors.values()):  # nothing learns by what it returns
        cuts = []
        for operation in recorder.operations:
            operation.cuts.clear()
    samples, outputs = first_tensor(example).shape[0], {} if with_gradients else recorder.outputs
    noted = recorder.operations, recorder.calls, recorder.host_reads
    return Recording(*noted, draws, replaced, output, returned, cuts, samples, outputs)


def may_nest(model: nn.Module) -> bool:
    """Return whether a model may return nested tensors where nobody watches: nn.TransformerEncoder's, of tokens."""
    return any(isinstance(each, nn.TransformerEncoder) for each in model.modules())


def _learning(tensor: Tensor) -> Tensor:
    """Return a copy that has gradients where it can; no leaf, which a model could not change in place."""
    can = tensor.is_floating_point() or tensor.is_complex()
    return tensor.clone().requires_grad_().clone() if can else tensor.clone()


def _is_cut(value: Value, tensor: Tensor) -> bool:
    """Return whether a tensor has another gradient than that of the operators that made its value."""
    if not tensor.is_floating_point() or tensor.is_leaf and tensor.requires_grad:  # a parameter, whatever hooks it has
        return False
    lost = value.learns and not tensor.requires_grad
    return lost or isinstance(tensor.grad_fn, BackwardCFunction) or bool(tensor._backward_hooks)


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
    state: list[Value] = field(default_factory=list)
    """The parameters, buffers and attributes that lie there."""


_BASE = object()  # stands for the tensor that a view is made of


class _Recorder(OperatorMode):
    """Notes operators, as a dispatch mode, and calls of layers, as hooks."""

    def __init__(self, model: nn.Module, originals: frozenset[nn.Module], *, lines: bool) -> None:
        super().__init__()
        self._lines = lines
        self.operations: list[Operation] = []
        self.calls: list[Call] = []
        self.host_reads: list[HostRead] = []
        self.outputs: dict[nn.Module, Any] = {}
        self.read: list[tuple[Operation, Value, Tensor]] = []
        self.quiet = 0
        self._values = 0
        self._memory: dict[Any, _Memory] = {}
        self._open: list[Call] = []
        # Detached tensors lie where those do that they are detached from, and in the same form.
        self._detached: dict[int, tuple[Tensor, Value]] = {}
        self._originals = originals
        self._autocasts = _autocasts()
        self._names: defaultdict[nn.Module, list[str]] = defaultdict(list)
        for name, layer in model.named_modules(remove_duplicate=False):
            self._names[layer].append(name)
            for key, attribute in vars(layer).items():
                self.take([attribute], "attribute", f"{name}.{key}".strip("."))
        self._take_state(model)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """While open, nothing is noted: what runs is the recorder's own."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    # Values

    def take(self, tensors: list[Any], leaf: str, name: str = "") -> None:
        """Note tensors that are there before the forward; one that is known gets another name."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and not is_lazy(tensor):
                memory, form = self._memory_of(tensor), _form(tensor)
                if form not in memory.values:
                    is_state = leaf in ("parameter", "buffer")
                    value = self._new(tensor, leaf=leaf, from_input=leaf == "input", from_state=is_state)
                    value.learns, value.tensor = tensor.requires_grad, tensor if is_state else None
                    memory.values[form] = (value, memory.version)
                    memory.state += [value] * (leaf in STATE)
                memory.values[form][0].names.append(name)

    def _take_state(self, module: nn.Module) -> None:
        for leaf, named in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
            for name, tensor in named(remove_duplicate=False):
                self.take([tensor], leaf, name)

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
        return self._value_in(self._memory_of(tensor), _form(tensor), tensor)

    def _value_in(self, memory: _Memory, form: Any, tensor: Tensor | Value) -> Value:
        known = memory.values.get(form)
        if known is not None and known[1] == memory.version:
            return known[0]
        if known is None and not memory.values:
            value = self._new(tensor, leaf="unknown")
            value.tensor = tensor.detach().clone() if isinstance(tensor, Tensor) and not is_lazy(tensor) else None
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
        keeps: Any = tensor.untyped_storage() if has_memory(tensor) else tensor
        key: Any = ("object", id(tensor)) if keeps is tensor else keeps._cdata
        return self._memory.setdefault(key, _Memory(keeps))

    def _new(self, tensor: Tensor | Value, *, learns: bool = False, **known: Any) -> Value:
        self._values += 1
        return value_like(tensor, self._values - 1, learns=learns and tensor.dtype.is_floating_point, **known)

    def _add(self, function: Any, args: Any, kwargs: Any, outputs: list[Any]) -> Operation:
        reads = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Value)]
        line = line_of_the_user() if self._lines else ""
        operation = Operation(len(self.operations), function, args, kwargs, reads, tuple(self._open), line)
        self.operations.append(operation)
        known = {each: any(getattr(value, each) for value in reads) for each in ("from_input", "from_state", "learns")}
        known["learns"] &= not (operation.name.startswith(("new_", "detach")) or operation.name.endswith("_like"))
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
        made = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        if not isinstance(func, torch._ops.OpOverload):
            self._made_unseen(func, read_args, read_kwargs, made)
            return output
        if func is torch.ops.aten.lift_fresh.default and read_args[0].leaf == "unknown":
            read_args[0].leaf = "constant"
        written = written_tensors(func, args, kwargs)
        fresh = [each for each in made if not any(each is other for other in written)]
        operation = self._add(func, read_args, read_kwargs, [*fresh, *written])
        if torch.is_grad_enabled():
            pairs = list(zip(operation.reads, given, strict=True))
            operation.cuts = [value for value, each in pairs if _is_cut(value, each)]
            self.read += [(operation, *pair) for pair in pairs]
        if len(written) > 1 and func.overloadpacket.__name__ in BATCH_NORMS:  # reads them to write them, and no more
            operation.reads = [each for each in operation.reads if each not in read_args[3:5]]
        operation.is_random = _is_random(func, args, kwargs)
        operation.flops = flops_of(func, args, kwargs, output)
        if operation.reads and any(tag in func.tags for tag in _HOST_READS) and _asks(func, args):
            self._note(operation.name, operation.reads[0])
        for tensor, value in zip(fresh, operation.makes, strict=False):
            if operation.name == "detach":
                self._detached[id(tensor)] = (tensor, value)
                continue
            memory, form = self._memory_of(tensor), _form(tensor)
            base = next((its for its_memory, its in before if its_memory is memory), None)
            if base == form and func.is_view:  # the same elements in the same places: what reads it reads the base
                continue
            if base is not None and base != form:
                first = next(index for index, each in enumerate(args) if isinstance(each, Tensor))
                view = tuple(_BASE if index == first else each for index, each in enumerate(read_args))
                memory.views[form] = (base, func, view, read_kwargs)
            memory.values[form] = (value, memory.version)
        for tensor, value in zip(written, operation.makes[len(fresh) :], strict=True):
            memory = self._memory_of(tensor)
            for old, _ in memory.values.values():
                old.written = operation.number if old.written is None else old.written
            operation.changes += memory.state
            memory.version += 1
            memory.values[_form(tensor)] = (value, memory.version)
            memory.written.append(value)
        return output

    def _made_unseen(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor]) -> None:
        """Note an operation of which nothing more is known than what it reads and makes."""
        for tensor, value in zip(made, self._add(function, args, kwargs, made).makes, strict=True):
            memory = self._memory_of(tensor)
            memory.values[_form(tensor)] = (value, memory.version)

    def read_by_host(self, how: str, tensor: Tensor) -> None:
        """Note that numbers of a tensor leave PyTorch."""
        with self.unwatched():
            self._note(how, self.value(tensor))

    def _note(self, how: str, value: Value) -> None:
        is_random = any(each.is_random for each in ancestors(value))
        known = value.from_state and self._open and type(self._open[-1].layer).__module__.startswith("torch.nn.")
        if value.from_input or is_random or value.from_state and not known:  # of those nothing else depends on it
            self.host_reads.append(HostRead(how, value, line_of_the_user()))

    # Layers

    def begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Note that a layer is called: a forward pre-hook, without keywords for those that the model does not name."""
        if self.quiet or kwargs is None and self._names.get(layer):
            return
        if layer in self._originals:
            raise BadInput(
                f"model: at {line_of_the_user()} it calls a {type(layer).__name__} by a reference that a copy of the "
                "model keeps to the original's; wants layers as attributes, or in an nn.ModuleList or nn.ModuleDict"
            )
        with self.unwatched():
            if layer not in self._names:
                self._take_state(layer)
            name = shortest(self._names[layer]) if self._names[layer] else ""
            args, kwargs = self.with_values((args, kwargs or {}))
            self._open.append(Call(layer, name, len(self.operations), args, kwargs, _autocasts() != self._autocasts))

    def end(self, layer: nn.Module, _inputs: Any, output: Any, *, registered: bool = True) -> None:
        """Note that a layer returns: a forward hook behind its own, or of layers that the model does not name."""
        if self.quiet or not registered and self._names.get(layer):
            return
        with self.unwatched():
            while self._open[-1].layer is not layer:  # calls that were left by an exception
                self._open.pop()
            call = self._open.pop()
            given = tuple(each for each in tree_leaves((call.args, call.kwargs)) if isinstance(each, Value))
            for _, tensor in places(output):
                if isinstance(tensor, Tensor) and not self._memory_of(tensor).values:  # made where nothing is seen
                    self._made_unseen(f"a {type(layer).__name__}", given, {}, [tensor])
            call.returned = self.returned(output)
            # its own list or dict, of which the model may take something later
            self.outputs[layer] = copy.copy(output) if isinstance(output, (list, dict)) else output
            call.ended, call.order = len(self.operations), len(self.calls)
            self.calls.append(call)


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


def _autocasts() -> list[bool]:
    return [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]


def _form(tensor: Tensor) -> Any:
    if not has_memory(tensor):
        return "object"
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _asks(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the host does wait for an operator that may let it: an index waits for masks alone."""
    if func.overloadpacket is not torch.ops.aten.index:
        return True
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _is_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws numbers: attention is tagged so even where it drops nothing."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    schema = func._schema.arguments
    given = {each.name: each.default_value for each in schema if each.has_default_value()}
    given |= dict(zip((each.name for each in schema), args, strict=False)) | dict(kwargs)
    return given.get("dropout_p", 1.0) != 0.0


def line_of_the_user() -> str:
    """Return file and line of the innermost running code that is the user's, or a package's that the user calls."""
    frames = frames_from(sys._getframe(1))
    whose = (Owner.USER, Owner.PACKAGE)
    return next((line_of(frame) for frame, owner in frames if owner in whose), "an unknown line")
