"""MemoryPool: device memory that PyTorch's allocator keeps apart, for as long as graphs or counters use it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from .lifetimes import keep_in_children


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
