"""LoadWatcher: notes when CUDA loads code, how much, and at which line of the user's; CUPTI tells it."""

import ctypes
import sys

import torch

from ..trace import Load
from ..user_code import innermost_line

#: CUpti_CallbackDomain and, of it, CUpti_CallbackIdResource.
_RESOURCE, _MODULE_LOADED = 3, 6
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class _Module(ctypes.Structure):
    """CUpti_ModuleResourceData."""

    _fields_ = [("number", ctypes.c_uint32), ("size", ctypes.c_size_t), ("cubin", ctypes.c_void_p)]


class _Resource(ctypes.Structure):
    """CUpti_ResourceData."""

    _fields_ = [("context", ctypes.c_void_p), ("handle", ctypes.c_void_p), ("module", ctypes.POINTER(_Module))]


class LoadWatcher:
    """Notes what code is loaded within its ``with`` block, by any thread; without any it costs a request nothing.

    CUPTI has one subscriber, and torch.profiler stays that once it has run: in such a process nothing is seen.
    """

    def __init__(self) -> None:
        """Have seen nothing."""
        self.request = 0
        """The one that runs, as whoever runs it says."""
        self.seen: tuple[Load, ...] | None = None
        """None: CUPTI is not there, or another has it."""
        self._subscriber = ctypes.c_void_p()
        self._callback = _CALLBACK(self._note)  # CUPTI keeps no reference

    def __enter__(self) -> "LoadWatcher":
        """Begin to note."""
        try:
            self._cupti = ctypes.CDLL(f"libcupti.so.{(torch.version.cuda or '').partition('.')[0]}")
        except OSError:
            return self
        if self._cupti.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None) == 0:
            self.seen = ()
            self._cupti.cuptiEnableCallback(1, self._subscriber, _RESOURCE, _MODULE_LOADED)
        return self

    def __exit__(self, *raised: object) -> None:
        """End it; the profiler may have CUPTI."""
        if self.seen is not None:
            self._cupti.cuptiUnsubscribe(self._subscriber)

    def _note(self, _user: int | None, _domain: int, _event: int, resource: int) -> None:
        module = ctypes.cast(resource, ctypes.POINTER(_Resource)).contents.module.contents
        assert self.seen is not None
        self.seen += (Load(self.request, module.size, innermost_line(sys._getframe().f_back)),)
