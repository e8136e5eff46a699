"""``shallow_copy``: a copy of a model to work on, which shares its parameters and leaves the model alone."""

import copy
from collections import OrderedDict, deque
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import nn

from .hooks import ThreadHook

#: Attributes that PyTorch gives to every module.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def shallow_copy(module: nn.Module, source_of: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a tree of modules, sharing its parameters and buffers; what is done to the copy leaves the original alone.

    Methods of the modules that they hold (``self.forward = self.other``, hooks), and modules in plain collections, in
    weak references, and in closures and defaults of functions, are those of the copies.

    ``source_of`` gets the original of each copy; one original has one copy, however often it occurs.
    """
    before = set(source_of)
    duplicate = _copy_tree(module, source_of)
    copies = {original: its for its, original in source_of.items()}
    memo: dict[int, Any] = {}
    fresh = [each for each in source_of if each not in before and not isinstance(each, torch.jit.ScriptModule)]
    for are_functions in (False, True):  # last: their closures may hold what a module holds
        for each in fresh:
            for name, value in each.__dict__.items():
                if name not in OF_EVERY_MODULE and isinstance(value, FunctionType) == are_functions:
                    each.__dict__[name] = _of_copies(value, copies, memo)
    for hooks in (vars(each)[name] for each in fresh for name in _HOOKS):
        hooks.update({key: _of_copies(hook, copies, memo) for key, hook in hooks.items()})
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


def _copy_tree(module: nn.Module, source_of: dict[nn.Module, nn.Module]) -> nn.Module:
    copies = {original: duplicate for duplicate, original in source_of.items()}
    if module in copies:
        return copies[module]
    if isinstance(module, torch.jit.ScriptModule):  # compiled: there is nothing in it that could be changed
        source_of[module] = module
        return module
    duplicate = object.__new__(type(module))  # fx.GraphModule would make another class
    # its own dictionaries of parameters, buffers, modules and hooks; another thread may be changing the module's
    duplicate.__dict__ = {
        name: _copied(value) if name.startswith("_") and isinstance(value, (dict, set)) else value
        for name, value in module.__dict__.copy().items()
    }
    for hooks in (duplicate._forward_hooks, duplicate._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, ThreadHook)]:
            del hooks[key]  # of another thread that runs the original
    source_of[duplicate] = module
    for name, child in duplicate._modules.items():
        duplicate._modules[name] = None if child is None else _copy_tree(child, source_of)
    return duplicate


def _copied(collection: Any) -> Any:
    """Copy a collection: PyTorch's own, an OrderedDict that may be changing, without running Python in between."""
    return collection.copy() if type(collection) is OrderedDict else copy.copy(collection)
