"""``shallow_copy``: a copy of a model to work on, which shares its parameters and leaves the model alone."""

import copy
from collections import OrderedDict
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from .hooks import ThreadHook

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def shallow_copy(module: nn.Module, source_of: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a tree of modules, sharing its parameters and buffers; what is done to the copy leaves the original alone.

    Methods of the modules that they hold (``self.forward = self.other``, hooks), and modules in plain lists and dicts,
    are those of the copies. A closure keeps what it has closed over.

    ``source_of`` gets the original of each copy; one original has one copy, however often it occurs.
    """
    before = set(source_of)
    duplicate = _copy_tree(module, source_of)
    copies = {original: its for its, original in source_of.items()}
    memo: dict[int, Any] = {}
    for each in [each for each in source_of if each not in before and not isinstance(each, torch.jit.ScriptModule)]:
        for name, value in each.__dict__.items():
            if name in ("_forward_hooks", "_forward_pre_hooks"):
                value.update({key: _of_copies(hook, copies, memo) for key, hook in value.items()})
            elif name not in _OF_EVERY_MODULE:
                each.__dict__[name] = _of_copies(value, copies, memo)
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
        parts = _of_copies([value.func, list(value.args), dict(value.keywords)], copies, memo)
        return partial(parts[0], *parts[1], **parts[2])
    if type(value) not in (list, tuple, dict):
        return value
    if isinstance(value, tuple):
        return tuple(_of_copies(each, copies, memo) for each in value)
    if id(value) not in memo:
        made: Any = type(value)()
        memo[id(value)] = made  # before its parts, of which one may be the collection itself
        if isinstance(value, dict):
            made.update({key: _of_copies(each, copies, memo) for key, each in value.items()})
        else:
            made.extend(_of_copies(each, copies, memo) for each in value)
    return memo[id(value)]


def _copy_tree(module: nn.Module, source_of: dict[nn.Module, nn.Module]) -> nn.Module:
    copies = {original: duplicate for duplicate, original in source_of.items()}
    if module in copies:
        return copies[module]
    if isinstance(module, torch.jit.ScriptModule):  # compiled: there is nothing in it that could be changed
        source_of[module] = module
        return module
    duplicate = module.__new__(type(module))
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
