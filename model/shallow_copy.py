"""``shallow_copy``: a copy of a model to work on, which shares its parameters and leaves the model alone."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from .hooks import ThreadHook


def shallow_copy(module: nn.Module, source_of: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copy a tree of modules, sharing its parameters and buffers; what is done to the copy leaves the original alone.

    ``source_of`` gets the original of each copy; one original has one copy, however often it occurs.
    """
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
        duplicate._modules[name] = None if child is None else shallow_copy(child, source_of)
    return duplicate


def _copied(collection: Any) -> Any:
    """Copy a collection: PyTorch's own, an OrderedDict that may be changing, without running Python in between."""
    return collection.copy() if type(collection) is OrderedDict else copy.copy(collection)
