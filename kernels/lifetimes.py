"""Lifetimes of what CUDA has given: it is destroyed neither in a forked child, where CUDA does not work, nor at exit.

In a child PyTorch's destructors of events, and of memory that a stream may still use, end the process (SIGABRT): they
call CUDA, whose refusal they cannot report. So children keep all of it as long as they live.
"""

import ctypes
import os
import sys
from abc import ABC, abstractmethod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_events: "WeakSet[torch.cuda.Event]" = WeakSet()
_storages: dict[int, StorageWeakRef] = {}  # by their addresses, which the references keep from others
_most = 64  # of them, before those that are gone are looked for


def is_forked() -> bool:
    """Return whether this process was forked from one that uses CUDA, and cannot use it itself."""
    return bool(torch.cuda._is_in_bad_fork())


def refuse_forked() -> None:
    """Raise ``RuntimeError`` in a forked child."""
    if is_forked():
        raise RuntimeError(
            "this process was forked from one that uses CUDA, which does not work here: runners and networks on a GPU "
            "are those of the process that made them; start processes by 'spawn' (torch.multiprocessing), or fork "
            "before CUDA is used, and make a runner in each"
        )


class Lasting(ABC):
    """Base of what destroys something of CUDA's once nobody refers to it, except where that must not be."""

    # Bound now: while Python ends, modules are cleared, and their names stand for None.
    def __del__(self, _python_ends: Any = sys.is_finalizing, _is_forked: Any = is_forked) -> None:
        if not (_python_ends() or _is_forked()):
            self._destroy()

    @abstractmethod
    def _destroy(self) -> None:
        """Destroy what is there; after an error in ``__init__`` some of it may not be."""


def new_event() -> torch.cuda.Event:
    """Make an event that forked children do not destroy."""
    event = torch.cuda.Event()
    _events.add(event)
    return event


def keep_in_children(tensor: Tensor) -> None:
    """Let forked children not free memory of which PyTorch notes the streams that use it, to ask them before."""
    global _most
    storage = tensor.untyped_storage()
    if storage._cdata in _storages:
        return
    _storages[storage._cdata] = StorageWeakRef(storage)
    if len(_storages) > _most:
        for address, reference in [*_storages.items()]:  # of a list, since other threads may add to it
            if reference.expired():
                _storages.pop(address, None)
        _most = 2 * len(_storages) + 64


def _keep_all() -> None:
    if is_forked():
        storages = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in _storages.values()]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object([*_events, *storages]))  # a list that nobody destroys


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_all)
