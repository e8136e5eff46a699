"""Lifetimes of what CUDA has given: events and memory, which are not destroyed in a forked child, where CUDA fails."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
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
    event: torch.cuda.Event = _of_no_child(torch.cuda.Event)()
    return event


@cache
def _of_no_child(kind: type) -> type:
    """Make a class of events that tell of their end themselves: torch 2.11 does not clear weak references to one."""
    return type(kind.__name__, (kind,), {"__del__": _keep_in_child})


def _keep_in_child(one: object, _is_forked: Callable[[], bool] = torch.cuda._is_in_bad_fork) -> None:
    if _is_forked():
        _keep(one)


def _keep(
    one: object, _add: Any = ctypes.pythonapi.Py_IncRef, _held: Callable[[object], Any] = ctypes.py_object
) -> None:
    """Let nobody ever destroy an object."""
    _add(_held(one))


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
        _keep([*_owners.values()])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_all)


class MemoryPool:
    """Memory of a CUDA device that is handed out for nothing but what is allocated in this pool.

    A graph holds addresses and no references. What it has allocated from a pool of its own no ``empty_cache`` gives to
    others, however its tensors come and go. A pool that goes leaves its memory to PyTorch's allocator, as a
    ``torch.cuda.CUDAGraph`` does; ``torch.cuda.MemPool`` would free it at once, and ends the process where another
    thread is capturing a graph then (an assertion of torch 2.11).
    """

    def __init__(self, device: torch.device) -> None:
        """Make a pool of ``device``, which must have an index; nothing is allocated yet."""
        self._device, self._id = device.index, torch.cuda.graph_pool_handle()
        self._held = 0  # times, all released in the end
        keep_in_children(self)
        with self.allocating():  # the pool begins to exist
            pass

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Take from this pool all that this thread allocates on the device, whatever other pool it allocates from."""
        try:
            self._held += 1  # before: an interrupt may come as soon as it is held; one release too many is refused
            torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, self._id)
            yield
            torch._C._cuda_endAllocateToPool(self._device, self._id)
        except BaseException:
            with suppress(RuntimeError):  # an interrupt came before the beginning, or after the end
                torch._C._cuda_endAllocateToPool(self._device, self._id)
            raise

    def __del__(self, _python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _python_ends():  # which clears this module
            with suppress(Exception):  # the device is lost
                for _ in range(self._held):
                    torch._C._cuda_releasePool(self._device, self._id)


def empty_cache() -> None:
    """Give the memory back to CUDA that PyTorch's allocator keeps and nobody uses, as far as it does so now.

    While any thread captures a graph or allocates from a pool it refuses (an assertion of torch 2.11).
    """
    with suppress(RuntimeError):
        torch.cuda.empty_cache()
