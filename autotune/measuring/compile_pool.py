"""Processes that compile launches of heads, whose first launch then finds its kernel in Triton's cache on disk."""

import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import NamedTuple

import torch

from ...kernels.launch.launch_config import LaunchConfig
from ...model import FusedAuxHead
from .heads_alone import AloneHead

#: Cores that are left to the process that times, whose launches must not wait.
_CORES_LEFT = 2
#: Processes at most: each takes some 300 MB.
_MOST_PROCESSES = 32


class InputOf(NamedTuple):
    """A head and its input without any data."""

    head: FusedAuxHead
    size: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, one: AloneHead) -> "InputOf":
        """Describe a head and its input."""
        # copied with parameters that are none, lest hundreds of megabytes are
        bare = {id(each): torch.nn.Parameter(torch.empty_like(each, device="meta")) for each in one.head.parameters()}
        return cls(copy.deepcopy(one.head, bare), one.x.size(), one.x.stride(), one.x.dtype)

    def made(self) -> AloneHead:
        """Make it on the CPU, where what nobody writes takes up addresses but no memory."""
        x = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        return AloneHead(self.head.to_empty(device="cpu"), x)


def compile_alone(one: InputOf, *configs: LaunchConfig) -> None:
    """Launch a head by itself; see ``AloneHead.launch``."""
    alone = one.made()
    for config in configs:
        alone.launch(config)


class CompilePool:
    """Processes that compile for one kind of GPU; a context manager, which ends them.

    They end with the process that made them, however that ends. What fails in them fails again where it is launched.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        """Begin them, for a compute capability."""
        count = min(max(len(os.sched_getaffinity(0)) - _CORES_LEFT, 1), _MOST_PROCESSES)
        context = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # which lets a terminal's Ctrl-C through again
        self._pool = ProcessPoolExecutor(
            count, context, initializer=_begin, initargs=(10 * capability[0] + capability[1],)
        )
        self._begin([partial(int)] * count)  # they import meanwhile

    def run(self, jobs: Sequence[Callable[[], object]]) -> None:
        """Have jobs done, partials of functions of this module, in any order, and wait for all."""
        for one in self._begin(jobs):
            one.exception()

    def as_done(self, jobs: Sequence[Callable[[], object]]) -> Iterator[int]:
        """Have jobs done, and name each by its number as soon as it is over; last those that nobody will do."""
        begun = {one: number for number, one in enumerate(self._begin(jobs))}
        for one in as_completed(begun):
            yield begun[one]
        yield from range(len(begun), len(jobs))

    def _begin(self, jobs: Sequence[Callable[[], object]]) -> list[Future[object]]:
        begun: list[Future[object]] = []
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process, which ends them
        try:
            with suppress(BrokenExecutor):  # somebody killed them: what launches compiles
                for job in jobs:
                    begun.append(self._pool.submit(job))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return begun

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _begin(capability: int) -> None:
    """Make this process one that only compiles."""
    from .compile_only import compile_only

    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    os.nice(10)
    torch.set_num_threads(1)
    compile_only(capability)
