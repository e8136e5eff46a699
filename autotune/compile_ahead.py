"""Compiles heads' launches in other processes, ahead of timing: into Triton's cache on disk, where they are found."""

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import wait as wait_for_one
from typing import NamedTuple

import torch

from ..kernels.launch_config import LaunchConfig, multiprocessors
from ..model import FusedAuxHead
from .alone_head import AloneHead

#: Cores that are left to the process that times, whose launches must not wait.
_CORES_LEFT = 4


class _Head(NamedTuple):
    """All of a head that its launches are compiled for."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    classes: int
    features: int
    bias: bool
    pool: str
    pool_size: tuple[int, int]
    return_probs: bool

    @classmethod
    def of(cls, alone: AloneHead) -> "_Head":
        head, x = alone.head, alone.x
        linear = head.linear
        return cls(
            tuple(x.shape), tuple(x.stride()), x.dtype, head.num_classes, linear.in_features, linear.bias is not None,
            head.pool, head.pool_size, head.return_probs,
        )  # fmt: skip


class CompileAhead:
    """Processes that compile launches of heads by themselves for one GPU; a context manager, which ends them.

    They have no GPU and a low priority, and end with the process that made them, however that ends. What fails there
    fails again where it is launched, and is told there.
    """

    def __init__(self, capability: int, count: int) -> None:
        """Compile for GPUs of a compute capability (90 for 9.0) with ``count`` multiprocessors."""
        self._pool = ProcessPoolExecutor(
            max(len(os.sched_getaffinity(0)) - _CORES_LEFT, 1),  # started as they are needed
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(capability, count),
        )
        self._under_way: dict[tuple[_Head, LaunchConfig], Future[None]] = {}

    @classmethod
    def beside(cls, device: torch.device) -> "CompileAhead":
        """Compile for a GPU of this machine."""
        major, minor = torch.cuda.get_device_capability(device)
        return cls(10 * major + minor, multiprocessors(device))

    def begin(self, head: AloneHead, configs: Sequence[LaunchConfig]) -> None:
        """Begin to compile launches of ``head``, after those that were begun before."""
        described = _Head.of(head)
        with suppress(BrokenExecutor):  # somebody killed them: what launches compiles
            for config in configs:
                if (described, config) not in self._under_way:
                    self._under_way[described, config] = self._pool.submit(_compile, described, config)

    def finish(self, head: AloneHead, configs: Sequence[LaunchConfig]) -> None:
        """Wait for those that were begun."""
        described = _Head.of(head)
        wait([begun for config in configs if (begun := self._under_way.get((described, config))) is not None])

    def __enter__(self) -> "CompileAhead":
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _start(capability: int, count: int) -> None:
    """Make this process one that only compiles."""
    from ..kernels.compile_only import compile_only  # there is no Triton for some platforms

    os.nice(10)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait_for_one([parent.sentinel]), os._exit(1)), daemon=True).start()
    compile_only(capability, count)


def _compile(described: _Head, config: LaunchConfig) -> None:
    _twin(described).launch(config)


@lru_cache(maxsize=1)
def _twin(described: _Head) -> AloneHead:
    """Make such a head on the CPU, where it takes up addresses but no memory."""
    x = torch.empty_strided(described.size, described.stride, dtype=described.dtype)
    head = FusedAuxHead(
        described.features, described.classes, pool=described.pool, pool_size=described.pool_size,
        return_probs=described.return_probs, bias=described.bias, dtype=described.dtype,
    )  # fmt: skip
    return AloneHead(head, x)
