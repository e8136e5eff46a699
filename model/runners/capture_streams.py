"""Streams that graphs are captured on, a pair for each runner, with the workspaces that cuBLAS has for them."""

import torch

from ...kernels.cuda_runtime import new_stream
from ...kernels.memory_pool import MemoryPool

#: Pairs that no runner has now, by device and the trunk's priority, and their workspaces. They are kept: cuBLAS keeps
#: its workspace of a stream until somebody clears all of them.
_free: dict[tuple[torch.device, int], list["CaptureStreams"]] = {}


class CaptureStreams:
    """Streams of one runner's captures.

    A graph keeps the address of the workspace that cuBLAS has for the stream of the capture, so that two graphs which
    may run at the same time must come from different streams. A kernel keeps the priority of the stream that it was
    captured on; the side stream's is 0.
    """

    def __init__(self, device: torch.device, trunk_priority: int) -> None:
        """Make streams of ``device``, which is current."""
        self.trunk = new_stream(device, trunk_priority)
        self.side = new_stream(device, 0)
        self._kind = device, trunk_priority
        self._workspaces = MemoryPool(device)

    def allocate_workspaces(self, stream: torch.cuda.Stream) -> None:
        """Let cuBLAS allocate what it has for one of the streams in memory that lives as long as they.

        ``torch.compile`` with CUDA graphs clears all workspaces that cuBLAS has. From PyTorch's common memory they
        would then go to others while graphs write them. Fused heads call no cuBLAS, so that the side stream needs none
        for them.
        """
        with self._workspaces.allocating(), torch.cuda.stream(stream):
            for dtype in (torch.float32, torch.float16):  # with and without tensor cores
                ones = torch.ones(16, 16, dtype=dtype, device=stream.device)
                torch.addmm(ones[0], ones, ones)  # cuBLASLt
                torch.mm(ones, ones)

    def wait(self) -> None:
        """Let the host wait for all that was launched on them."""
        self.trunk.synchronize()
        self.side.synchronize()

    def give_back(self) -> None:
        """Let other runners have the streams; nothing captured on them may run any more."""
        _free[self._kind].insert(0, self)  # in front: the next runner finds their workspaces


def take_streams(device: torch.device, trunk_priority: int) -> CaptureStreams:
    """Take streams of ``device``, which is current, for one runner's captures as long as its graphs live."""
    free = _free.setdefault((device, trunk_priority), [])
    streams = free.pop(0) if free else CaptureStreams(device, trunk_priority)
    try:
        streams.allocate_workspaces(streams.trunk)
    except BaseException:  # no memory for all of them; cuBLAS would keep those that it has, for nobody
        streams.give_back()
        raise
    return streams
