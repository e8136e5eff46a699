"""MemoryPool: device memory that PyTorch's allocator keeps apart, for as long as graphs or counters use it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch


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
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, self._id)  # the pool begins to exist
        torch._C._cuda_endAllocateToPool(self._device, self._id)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """Take from this pool all that this thread allocates on the device, whatever other pool it allocates from."""
        pool = self._device, self._id
        with ExitStack() as stack:
            torch._C._cuda_beginAllocateCurrentThreadToPool(*pool)
            stack.callback(torch._C._cuda_releasePool, *pool)  # which beginning has taken
            stack.callback(torch._C._cuda_endAllocateToPool, *pool)
            yield

    def __del__(self) -> None:
        with suppress(Exception):  # the device is lost, or the process ends
            torch._C._cuda_releasePool(self._device, self._id)
