"""Compilation of heads' launches in other processes, ahead of timing: into Triton's cache on disk."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait as wait_for_one
from typing import Any

import torch

from .launch_descriptions import LaunchDescription

#: Cores that are left to the process that times, whose launches must not wait.
_CORES_LEFT = 2
_PACKAGE = __name__.partition(".")[0]
#: Processes at most: each takes 100 to 200 MB that it does not share.
_MOST_PROCESSES = 32


class CompileAhead:
    """Processes that compile launches of heads for one GPU; a context manager, which ends them.

    They have a low priority, and end with the process that made them, however that ends. What fails there fails again
    where it is launched, and is told there.
    """

    def __init__(self, capability: int) -> None:
        """Compile for a compute capability (90 for 9.0); before any launch of heads here, see ``settle_cache_keys``."""
        from ...kernels.compile_only import settle_cache_keys  # there is no Triton for some platforms

        settle_cache_keys()
        processes = min(max(len(os.sched_getaffinity(0)) - _CORES_LEFT, 1), _MOST_PROCESSES)
        # One process imports for all of them, while the network is built, and is forked: PyTorch alone takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([name for name in sys.modules if name.startswith(f"{_PACKAGE}.")])
        # A terminal's Ctrl-C is for this process, which ends the others: they inherit that the signal is blocked.
        resource_tracker.ensure_running()  # unblocks the signal when it begins
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start, initargs=(capability,))
        self._under_way: dict[LaunchDescription, Future[None]] = {}

    @classmethod
    def beside(cls, device: torch.device) -> "CompileAhead":
        """Compile for a GPU of this machine."""
        major, minor = torch.cuda.get_device_capability(device)
        return cls(10 * major + minor)

    def begin(self, launches: Iterable[LaunchDescription]) -> None:
        """Begin to compile launches, after those that were begun before."""
        with suppress(BrokenExecutor):  # somebody killed them: what launches compiles
            for launch in launches:
                if launch not in self._under_way:
                    self._under_way[launch] = self._pool.submit(_compile, launch)

    def finish(self, launches: Iterable[LaunchDescription]) -> None:
        """Wait for those that were begun."""
        wait([begun for launch in launches if (begun := self._under_way.get(launch)) is not None])

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


#: Kernels that were compiled in such a process and have no launcher yet.
_compiled: list[Any] = []


def _start(capability: int) -> None:
    """Make this process one that only compiles."""
    from ...kernels.compile_only import compile_only, settle_cache_keys  # there is no Triton for some platforms

    os.nice(10)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait_for_one([parent.sentinel]), os._exit(1)), daemon=True).start()
    settle_cache_keys()
    global _compiled
    _compiled = compile_only(capability)


def _compile(launch: LaunchDescription) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    launch.launch()
    while _compiled:
        kernel = _compiled.pop()
        CudaLauncher(kernel.src, kernel.metadata)  # a C compiler makes it, half a second for each list of arguments
