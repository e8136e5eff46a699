"""Compilation of launches: in threads that launch each once, and ahead of timing in processes that get descriptions."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait as wait_for_one
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.launch.choose_config import overriding
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...model import FusedAuxHead
from .failures import Failure
from .heads_alone import AloneHead, launch_heads
from .timers import Key


class TensorDescription(NamedTuple):
    """All of a tensor but its data."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "TensorDescription":
        """Describe a tensor."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype)

    def allocate(self) -> Tensor:
        """Return such a tensor on the CPU, where it takes up addresses but no memory."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


class HeadDescription(NamedTuple):
    """All of a head and its input that launches are compiled for."""

    x: TensorDescription
    classes: int
    features: int
    bias: bool
    pool: str
    pool_size: tuple[int, int]
    return_probs: bool

    @classmethod
    def of(cls, alone: AloneHead) -> "HeadDescription":
        """Describe a head."""
        head, linear = alone.head, alone.head.linear
        return cls(
            TensorDescription.of(alone.x), head.num_classes, linear.in_features, linear.bias is not None,
            head.pool, head.pool_size, head.return_probs,
        )  # fmt: skip


@lru_cache(maxsize=32)
def _build(head: HeadDescription) -> AloneHead:
    module = FusedAuxHead(
        head.features, head.classes, pool=head.pool, pool_size=head.pool_size,
        return_probs=head.return_probs, bias=head.bias, dtype=head.x.dtype,
    )  # fmt: skip
    return AloneHead(module, head.x.allocate())


class AloneLaunch(NamedTuple):
    """A launch of one head by itself."""

    head: HeadDescription
    config: LaunchConfig

    def launch(self) -> None:
        """Launch such a head."""
        _build(self.head).launch(self.config)


class NetworkLaunches(NamedTuple):
    """Launches of a network's heads; see ``launch_heads``."""

    heads: tuple[HeadDescription, ...]
    """Heads of the taps."""
    classifier: HeadDescription | TensorDescription
    """The network's own, or its logits where it is no head."""
    ends: tuple[int, ...]
    exits: frozenset[int]
    configs: tuple[tuple[tuple[HeadShape, str], LaunchConfig], ...]
    """Configurations of heads, by shape and place."""

    def launch(self) -> None:
        """Launch such heads."""
        last = self.classifier
        classifier = _build(last) if isinstance(last, HeadDescription) else last.allocate()
        with overriding(dict(self.configs)):
            launch_heads([*map(_build, self.heads), classifier], self.ends, self.exits)


#: Hashable and small; its ``launch`` launches on tensors of the process' CPU.
LaunchDescription = AloneLaunch | NetworkLaunches


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
        from ...kernels.launch.compile_only import settle_cache_keys  # there is no Triton for some platforms

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
    from ...kernels.launch.compile_only import compile_only, settle_cache_keys  # there is no Triton for some platforms

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


#: Variants compiled at the same time, at most: each takes a core.
_MOST_WORKERS = 32
#: Seconds within which a launched kernel, which takes microseconds, has ended; the first ones also load code.
ENDS_S = 20.0
#: The kind of failure of a launch that had not.
NEVER_ENDS = "does not end"


def first_launches(
    variants: Sequence[Key], launch: Callable[[Key], object], device: torch.device
) -> dict[Key, Failure]:
    """Launch each variant once on a CUDA device, and return what failed.

    A kernel that never ends cannot be stopped, and whatever waits for the device waits for ever. So after a failure of
    the kind ``NEVER_ENDS`` nothing may, and the process ends without waiting once it gets there.
    """

    def attempt(variant: Key) -> Failure | None:
        try:
            stream = torch.cuda.Stream(device)  # of its own: the others are not to wait for it
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), torch.no_grad():
                launch(variant)
            return None if _ends(stream) else Failure(NEVER_ENDS, f"a launch was not done after {ENDS_S:g} s")
        except Exception as error:
            return Failure.of(error)

    first = [attempt(variant) for variant in variants[:1]]  # by itself: it reads the kernel's sources for all
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_WORKERS)) as pool:
        rest = list(pool.map(attempt, variants[1:]))
    found = {variant: failed for variant, failed in zip(variants, first + rest, strict=True) if failed}
    if any(failed.kind == NEVER_ENDS for failed in found.values()):
        atexit.register(_leave)
    return found


def _ends(stream: torch.cuda.Stream) -> bool:
    """Wait for a stream, though not for ever."""
    until = time.monotonic() + ENDS_S
    while not stream.query():
        if time.monotonic() > until:
            return False
        time.sleep(0.0002)
    return True


def _leave() -> None:
    """End the process at once: to take CUDA down in order waits for the device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
