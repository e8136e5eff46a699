"""CUDA's runtime, called directly for what PyTorch does not pass on: streams' numbers, captures, graphs."""

from typing import Any

import torch

from .lifetimes import refuse_forked

try:
    from cuda.bindings import driver as driver  # for other modules, too
    from cuda.bindings import runtime as runtime
except ImportError:  # where torch has no CUDA
    driver = runtime = None

#: Handles of the streams that ``new_stream`` has made.
_kept: set[int] = set()


def checked(returned: tuple[Any, ...]) -> Any:
    """Return the value of a call, None if it has none.

    Raises:
        RuntimeError: CUDA returned an error, ``torch.OutOfMemoryError`` where it was a lack of memory.
    """
    status, *values = returned
    if status != runtime.cudaError_t.cudaSuccess:
        refuse_forked()
        kind = torch.OutOfMemoryError if status == runtime.cudaError_t.cudaErrorMemoryAllocation else RuntimeError
        raise kind(f"{runtime.cudaGetErrorString(status)[1].decode()} ({status.name})")
    return values[0] if values else None


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a CUDA device, which need not be the current one, is being captured."""
    if torch.cuda.current_device() == device.index:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def capture_id(stream: int) -> int | None:
    """Return CUDA's id, unique in the process, of the capture that a stream, given as its ``cuda_stream``, is part of.

    None if it is in none, 0 if that capture has failed and was not ended yet.
    """
    error, status, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    checked((error,))
    if status == runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone:
        return None
    return int(number) if status == runtime.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive else 0


def stream_number(stream: int) -> int:
    """Return CUDA's number of a stream, given as its ``cuda_stream``, which no other stream of the process ever has."""
    return int(checked(runtime.cudaStreamGetId(stream)))


def new_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    """Make a stream of a CUDA device that is there as long as the process, and that nobody else has.

    torch's own streams are others', too: after 32 of a priority it hands out the first again.
    """
    with torch.cuda.device(device), beside_captures():
        handle = int(checked(runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, priority)))
    _kept.add(handle)
    return torch.cuda.ExternalStream(handle, device)


def may_be_destroyed(stream: torch.cuda.Stream) -> bool:
    """Return whether a stream is neither PyTorch's nor ours; CUDA may then give its handle to another one."""
    handle = stream.cuda_stream
    return handle != 0 and stream.stream_id == handle and handle not in _kept  # PyTorch's have ids of another kind


# A class, since at each request a generator's context would take the host four times as long.
class beside_captures:
    """Let this thread wait and allocate while others capture graphs; else that fails, and breaks their captures.

    By default CUDA takes every such call of any thread for part of what is captured (cudaStreamCaptureModeGlobal).
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self._before = checked(runtime.cudaThreadExchangeStreamCaptureMode(relaxed))

    def __exit__(self, *_: object) -> None:
        runtime.cudaThreadExchangeStreamCaptureMode(self._before)
