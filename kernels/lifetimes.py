"""Lifetimes of what CUDA has given: it is not destroyed in a forked child, where CUDA does not work."""

import ctypes
import os
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

_OwnerT = TypeVar("_OwnerT")

#: By their addresses, since tensors do not compare as keys do.
_owners: "WeakValueDictionary[int, Any]" = WeakValueDictionary()


def keep_in_children(owner: _OwnerT) -> _OwnerT:
    """Let no forked child destroy an object and what it then holds; returns the object.

    PyTorch's destructors of events, and of memory that a stream may still use, call CUDA and cannot tell that it
    refuses: they end the process (SIGABRT).
    """
    _owners[id(owner)] = owner
    return owner


def new_event() -> torch.cuda.Event:
    """Make an event that no forked child destroys."""
    return keep_in_children(torch.cuda.Event())


def is_forked() -> bool:
    """Return whether this process was forked from one that uses CUDA, and cannot use it itself."""
    return bool(torch.cuda._is_in_bad_fork())


def refuse_forked() -> None:
    """Raise ``RuntimeError`` in such a process."""
    if is_forked():
        raise RuntimeError(
            "this process was forked from one that uses CUDA, which does not work here: make runners in each process, "
            "and start it by 'spawn' (torch.multiprocessing) or fork it before CUDA is used"
        )


def _keep_all() -> None:
    if is_forked():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object([*_owners.values()]))  # of a list that nobody destroys


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_all)
