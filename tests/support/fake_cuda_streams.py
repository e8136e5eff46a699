"""Fake GPU for the doctor's watcher: CPU tensors taken for GPU tensors, with streams, events and blocks in Python.

What torch's callbacks tell of a GPU, a test or the fakes here tell through the same registries.
"""

import itertools
import threading

import torch
from auxhead.autotune.doctor.watching import operators, stream_uses, watcher
from torch.cuda import _gpu_trace

_handles = itertools.count(0x1000, 0x10)
_here = threading.local()


def current():
    """Return the stream that operators of this thread run on."""
    return getattr(_here, "stream", None) or Stream.default


class Stream:
    """A stream; ``default`` is the one that threads begin with."""

    default = None

    def __new__(cls, device=None, priority=0, **kwargs):
        stream = object.__new__(cls)
        stream.cuda_stream = kwargs.get("handle", next(_handles))
        stream.priority = priority
        stream.device = torch.device("cuda", kwargs.get("index", 0))
        return stream

    def __init__(self, *_args, **_kwargs):
        self.outer = []

    def begin(self):
        self.outer.append(current())
        _here.stream = self

    def end(self):
        _here.stream = self.outer.pop()

    def __enter__(self):
        self.begin()
        return self

    def __exit__(self, *_raised):
        self.end()

    def query(self):
        return True

    wait_event = torch.cuda.Stream.wait_event  # which calls the event's own method, in a file of torch's

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        event.wait(self)


class StreamContext:
    """The block of ``torch.cuda.stream(s)``."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.stream.begin()

    def __exit__(self, *_raised):
        if self.stream is not None:
            self.stream.end()


class Event:
    """An event; ``waits`` counts what its own methods were called for."""

    waits = 0

    def __init__(self):
        self.cuda_event = 0

    def record(self, stream=None):
        if not self.cuda_event:
            self.cuda_event = next(_handles)
            _gpu_trace.EventCreationCallbacks.fire_callbacks(self.cuda_event)
        _gpu_trace.EventRecordCallbacks.fire_callbacks(self.cuda_event, (stream or current()).cuda_stream)

    def wait(self, stream=None):
        Event.waits += 1
        if self.cuda_event:
            _gpu_trace.EventWaitCallbacks.fire_callbacks(self.cuda_event, (stream or current()).cuda_stream)

    def synchronize(self):
        Event.waits += 1
        if self.cuda_event:
            _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(self.cuda_event)

    def query(self):
        return True


class CUDAGraph:
    """A graph that does nothing; what is captured runs."""

    def capture_begin(self, pool=None, capture_error_mode="global"):
        pass

    def capture_end(self):
        pass

    def replay(self):
        return "replayed"


def fake_gpu(patch):
    """Have a GPU in what the watcher asks, until the test of ``patch`` ends; returns its default stream."""
    for name, fake in (
        ("Stream", Stream),
        ("StreamContext", StreamContext),
        ("Event", Event),
        ("CUDAGraph", CUDAGraph),
    ):
        patch.setattr(torch.cuda, name, fake)
    patch.setattr(torch, "Stream", Stream)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: current())
    patch.setattr(torch.cuda, "synchronize", _gpu_trace.DeviceSynchronizationCallbacks.fire_callbacks)
    patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(operators, "is_on_gpu", lambda tensor: True)
    patch.setattr(operators, "device_of", lambda tensor: 0)
    patch.setattr(watcher, "current_device", lambda: current().device.index)
    patch.setattr(watcher, "current_stream", lambda device: current().cuda_stream)
    patch.setattr(watcher, "is_capturing", lambda: False)
    patch.setattr(stream_uses, "current_priority", lambda device: current().priority)
    default = Stream(handle=0)
    patch.setattr(Stream, "default", default)
    return default


def allocated(tensor):
    """Tell that the memory of a tensor was allocated on the current stream."""
    _gpu_trace.MemoryAllocationCallbacks.fire_callbacks(tensor.untyped_storage().data_ptr())


def freed(tensor):
    """Tell that the memory of a tensor is given back."""
    _gpu_trace.MemoryDeallocationCallbacks.fire_callbacks(tensor.untyped_storage().data_ptr())
