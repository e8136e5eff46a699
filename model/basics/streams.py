"""The two streams of a device, a trunk that goes first and a side stream that takes what is left; launches; locks."""

from _thread import RLock
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import copy_context
from functools import cache
from typing import Any, NamedTuple

import torch

from ...kernels.cuda.runtime import beside_captures, may_be_destroyed, new_stream, stream_number


class StreamPair(NamedTuple):
    """Streams of one CUDA device. Lower numbers are higher priorities, and 0 is the lowest there is."""

    trunk: torch.cuda.Stream
    """Priority -1: its waiting blocks are placed before the side stream's."""
    side: torch.cuda.Stream
    """Priority 0."""


def has_streams(x: torch.Tensor) -> bool:
    """Return whether work on a tensor goes to streams."""
    return x.is_cuda


@cache
def stream_pair(device: torch.device) -> StreamPair:
    """Return the streams of a CUDA device, made once."""
    return StreamPair(new_stream(device, -1), new_stream(device, 0))


def current_handle(device: torch.device) -> int:
    """Return the handle of the current stream of a CUDA device.

    As ``torch.cuda.current_stream(device).cuda_stream``, but without making an object, which takes as long as looking
    over all heads of a network. Triton launches its kernels on this stream, too.
    """
    return torch._C._cuda_getCurrentRawStream(device.index)


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Let work go to a stream in this context; where it does already nothing is switched, which takes a host 15 us."""
    device = stream.device
    if torch.cuda.current_device() == device.index and current_handle(device) == stream.cuda_stream:
        return nullcontext()
    return torch.cuda.stream(stream)


class CallersStream:
    """A stream that calls came on, told from all others, of the same handle too."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Remember a stream."""
        self.stream = stream
        self._handle = stream.cuda_stream
        self._number = stream_number(self._handle) if may_be_destroyed(stream) else None

    def is_current(self) -> bool:
        """Return whether it is the current stream of its device; asked at each request."""
        return current_handle(self.stream.device) == self._handle and (
            self._number is None or stream_number(self._handle) == self._number
        )


class OwnedLock(RLock):  # type: ignore[misc]  # it may be subclassed, whatever the stubs say
    """A lock for one thread at a time, taken by ``with`` alone.

    An interrupt (Ctrl-C) is raised as a call returns. Up to Python 3.13 none is between the ``__enter__`` of a plain
    lock and the body of its ``with``; since 3.14 one is, and would leave the lock held. A lock that knows its owner can
    be released there without knowing whether it was taken.
    """

    def __enter__(self) -> bool:  # type: ignore[override]
        try:
            return self.acquire()
        except BaseException:
            try:
                self.release()
            except RuntimeError:  # it was not taken yet
                pass
            raise

    def is_mine(self) -> bool:
        """Return whether this thread has taken it."""
        return bool(self._is_owned())  # type: ignore[attr-defined]

    def is_taken(self) -> bool:
        """Return whether any thread has taken it."""
        if self.is_mine():
            return True
        if not self.acquire(blocking=False):
            return True
        self.release()
        return False


def each_once(launches: Sequence[Callable[[], object]], stream: torch.cuda.Stream | None) -> None:
    """Make launches on a stream, from a thread each, without gradients.

    What Triton has not compiled yet it then compiles side by side: a launch takes one to three seconds, most of which
    is spent outside of Python.
    """

    def make(launch: Callable[[], object]) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if stream is not None:  # modes of captures, too, are those of a thread
                stack.enter_context(torch.cuda.stream(stream))
                stack.enter_context(beside_captures())
            launch()

    with ThreadPoolExecutor(max(len(launches), 1)) as pool:
        # by what is set for this thread: how heads are launched, say
        begun = [pool.submit(copy_context().run, make, launch) for launch in launches]
    for each in begun:
        each.result()
