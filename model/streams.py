"""The two streams of a device: a trunk that goes first and a side stream that takes what is left."""

from functools import cache
from typing import NamedTuple

import torch


class StreamPair(NamedTuple):
    """Streams of one CUDA device. Lower numbers are higher priorities, and 0 is the lowest there is."""

    trunk: torch.cuda.Stream
    """Priority -1: its waiting blocks are placed before the side stream's."""
    side: torch.cuda.Stream
    """Priority 0."""


@cache
def stream_pair(device: torch.device) -> StreamPair:
    """Return the streams of a CUDA device, made once: torch hands out only 32 of a priority."""
    return StreamPair(torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=0))


def current_handle(device: torch.device) -> int:
    """Return the handle of the current stream of a CUDA device.

    As ``torch.cuda.current_stream(device).cuda_stream``, but without making an object, which takes as long as looking
    over all heads of a network. Triton launches its kernels on this stream, too.
    """
    return torch._C._cuda_getCurrentRawStream(device.index)
