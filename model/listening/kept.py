"""A copy of a model to work on (``shallow_copy``), and what puts back what forwards change of one (``kept``)."""

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ..basics.arguments import is_plain
from .hooks import ThreadHook, hooks_of
from .recording import OperatorMode, has_memory, written_tensors

_MISSING = object()
#: Attributes that PyTorch gives to every module.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Put each layer of a module, at the end, into the mode that it had; some ``train`` methods do more, or less."""
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training


@contextmanager
def kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back what forwards of a model change: modes, parameters, buffers, plain attributes, states of generators."""
    with ExitStack() as stack:
        stack.enter_context(_KeptParameters(model))
        # a lazy layer becomes another at its first call
        ours = (each for each in model.modules() if not isinstance(each, (torch.jit.ScriptModule, LazyModuleMixin)))
        for module in ours:
            own = [each for key, each in vars(module).items() if key not in _OF_EVERY_MODULE and type(each) is dict]
            for held in (vars(module), module._buffers, *own):
                stack.callback(_put_back_items, held, dict(held))
            for values in (each for each in vars(module).values() if type(each) is list):
                stack.callback(values.__setitem__, slice(None), list(values))
        stack.enter_context(modes_kept(model))
        for buffer in {*model.buffers()}:  # some forwards count in them
            if not is_lazy(buffer) and is_plain(buffer) and not buffer.is_meta:
                stack.callback(_put_back, buffer, buffer.detach().clone())
        stack.enter_context(own_random_numbers(device))
        yield


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """While open, seeding and drawing leave the random numbers outside as they are: Python's, NumPy's, PyTorch's."""
    python, numpy = generators()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)


def generators() -> tuple[Any, Any]:
    """Return the states of Python's generator and NumPy's; None for a NumPy that is not there."""
    return random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _put_back(tensor: Tensor, before: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if not torch.equal(tensor.nan_to_num(), before.nan_to_num()):  # else another thread may be reading it
            tensor.copy_(before)


def _put_back_items(held: dict[str, Any], before: dict[str, Any]) -> None:
    """Put back what a dict held, in its order, by which values are numbered."""
    for key in held.keys() - before.keys():
        del held[key]
    for key, each in before.items():
        if held.get(key, _MISSING) is not each:
            held[key] = each


class _KeptParameters(OperatorMode):
    """Copies parameters before an operator writes to them, and puts them back at the end."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held = [(each, each.detach()) for each in model.parameters() if has_memory(each)]
        self._by_memory: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for _, data in self._held:
            self._by_memory[data.untyped_storage()._cdata].append(data)
        self._before: dict[Tensor, Tensor] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy what an operator writes to, and run it."""
        for tensor in written_tensors(func, args, kwargs or {}):
            for data in self._by_memory.get(tensor.untyped_storage()._cdata, ()):
                if data not in self._before:
                    self._before[data] = data.clone()
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        """Put them back."""
        super().__exit__(*error)
        for data, before in self._before.items():
            _put_back(data, before)
        for parameter, data in self._held:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data


def shallow_copy(module: nn.Module, source_of: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a tree of modules, sharing its parameters and buffers; what is done to the copy leaves the original alone.

    Methods of the modules that they hold (``self.forward = self.other``, hooks), and modules in plain collections, in
    weak references, and in closures and defaults of functions, are those of the copies.

    ``source_of`` gets the original of each copy; one original has one copy, however often it occurs.
    """
    before = set(source_of)
    copies = {original: its for its, original in source_of.items()}
    duplicate = _copy_tree(module, source_of, copies)
    memo: dict[int, Any] = {}
    fresh = [each for each in source_of if each not in before and not isinstance(each, torch.jit.ScriptModule)]
    for are_functions in (False, True):  # last: their closures may hold what a module holds
        for each in fresh:
            for name, value in each.__dict__.items():
                if name not in _OF_EVERY_MODULE and isinstance(value, FunctionType) == are_functions:
                    each.__dict__[name] = _of_copies(value, copies, memo)
    for hooks in (hooks for each in fresh for hooks in hooks_of(each)):
        hooks.update({key: _of_copies(hook, copies, memo) for key, hook in hooks.items()})
    return duplicate


def _copy_tree(
    module: nn.Module, source_of: dict[nn.Module, nn.Module], copies: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in copies:
        return copies[module]
    if isinstance(module, torch.jit.ScriptModule):  # compiled: there is nothing in it that could be changed
        source_of[module] = copies[module] = module
        return module
    duplicate = object.__new__(type(module))  # fx.GraphModule would make another class
    # its own dictionaries of parameters, buffers, modules and hooks; another thread may be changing the module's,
    # so that PyTorch's own, an OrderedDict, is copied without running Python in between
    duplicate.__dict__ = {
        name: (value.copy() if type(value) is OrderedDict else copy.copy(value))
        if name.startswith("_") and isinstance(value, (dict, set))
        else value
        for name, value in module.__dict__.copy().items()
    }
    for hooks in (duplicate._forward_hooks, duplicate._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, ThreadHook)]:
            del hooks[key]  # of another thread that runs the original
    source_of[duplicate], copies[module] = module, duplicate
    for name, child in duplicate._modules.items():
        duplicate._modules[name] = None if child is None else _copy_tree(child, source_of, copies)
    return duplicate


def _of_copies(value: Any, copies: dict[nn.Module, nn.Module], memo: dict[int, Any]) -> Any:
    """Return a value with copies in place of their originals: a module, its method, or a collection of such."""
    if isinstance(value, nn.Module):
        if value not in copies and not isinstance(value, torch.jit.ScriptModule):  # in a list, where PyTorch looks not
            found: dict[nn.Module, nn.Module] = {}
            shallow_copy(value, found)
            copies.update({original: its for its, original in found.items()})
        return copies.get(value, value)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, _of_copies(value.__self__, copies, memo))
    if isinstance(value, partial):
        parts = _of_copies((value.func, value.args, value.keywords), copies, memo)
        return partial(parts[0], *parts[1], **parts[2])
    if isinstance(value, ref) and isinstance(value(), nn.Module):
        return ref(_of_copies(value(), copies, memo))
    if type(value) is tuple or hasattr(type(value), "_make"):  # a named one
        parts = (_of_copies(each, copies, memo) for each in value)
        return tuple(parts) if type(value) is tuple else value._make(parts)
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType) and "<" in value.__qualname__:  # others are no model's own
        return _function_of_copies(value, copies, memo)
    if not isinstance(value, (dict, list, deque, set)):
        return value
    made: Any = copy.copy(value)
    made.clear()
    memo[id(value)] = made  # before its parts, of which one may be the collection itself
    if isinstance(value, dict):
        made.update({_of_copies(key, copies, memo): _of_copies(each, copies, memo) for key, each in value.items()})
    else:
        (made.update if isinstance(value, set) else made.extend)([_of_copies(each, copies, memo) for each in value])
    return made


def _function_of_copies(value: FunctionType, copies: dict[nn.Module, nn.Module], memo: dict[int, Any]) -> FunctionType:
    """Return a function that is defined within another, with copies of the modules in its closure and defaults."""

    def of_copies(held: Any) -> Any:
        if isinstance(held, (dict, list, tuple, deque, set)):  # one without modules is there to be written to
            parts = list(held.values()) if isinstance(held, dict) else list(held)
            known = id(held) in memo or any(isinstance(each, nn.Module) for each in parts)
            return _of_copies(held, copies, memo) if known else held
        return _of_copies(held, copies, memo)

    cells = tuple(CellType() for _ in value.__closure__ or ())
    memo[id(value)] = made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
    for cell, its in zip(cells, value.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty one
            cell.cell_contents = of_copies(its.cell_contents)
    made.__dict__.update(value.__dict__)
    made.__defaults__ = value.__defaults__ and tuple(map(of_copies, value.__defaults__))
    made.__kwdefaults__ = value.__kwdefaults__ and {key: of_copies(each) for key, each in value.__kwdefaults__.items()}
    made.__qualname__ = value.__qualname__
    return made
