"""``CompileWorkers``: processes that compile graphs beside this one, which then finds them in Inductor's caches.

Inductor compiles a backbone in ten to forty seconds, nearly all of it Python, of which threads run one at a time.
"""

import math
import os
import pickle
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count as count_up
from pathlib import Path

import torch

from .compiled_part import Kind, compile_graph, handing_over

#: Workers at most, and processors that each wants.
_MOST, _PROCESSORS = 4, 4
#: What a worker answers to a graph that it has compiled.
_COMPILED = b"1"
#: Gigabytes that the machine must have, and the GPU must have free: a worker takes two and half of one.
_HOST_GB, _FREE_GB = 32.0, 8.0


def workers_for(device: torch.device) -> int:
    """Return how many workers this machine has room for."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    host_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 if hasattr(os, "sysconf") else 0.0
    has_memory = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > _FREE_GB * 1e9 and host_gb > _HOST_GB
    return min(_MOST, processors // _PROCESSORS) if has_memory else 0


class CompileWorkers:
    """Some processes with PyTorch of their own; what one of them cannot do is left undone, and not told."""

    def __init__(self, count: int) -> None:
        """Start as many, or as this machine lets; they take seconds to begin."""
        self._folder = tempfile.TemporaryDirectory(prefix="auxhead-compile-")
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": str(2 * _PROCESSORS)}
        self._workers: list[subprocess.Popen[bytes]] = []
        with suppress(OSError, TypeError):  # no memory for another one, no interpreter outside of this process
            while len(self._workers) < count:
                self._workers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __name__],
                        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                        bufsize=0,
                    )
                )  # fmt: skip
        self._given = [0] * len(self._workers)
        self._names = count_up()

    def take(self, graph: bytes, kinds: Sequence[Kind]) -> None:
        """Give a graph to the worker that has the fewest."""
        if not self._workers:
            return
        index = self._given.index(min(self._given))
        path = Path(self._folder.name) / str(next(self._names))
        try:
            path.write_bytes(pickle.dumps((graph, kinds)))
        except OSError:  # no room for it
            return
        self._given[index] += 1
        stdin = self._workers[index].stdin
        assert stdin is not None
        with suppress(OSError):  # it has died
            stdin.write(f"{path}\n".encode())

    def wait(self, until: float = math.inf) -> bool:
        """Wait until workers have done what they could with all that was given, and return whether they compiled it.

        False if time is over before, too; ``until`` is by ``time.monotonic``.
        """
        done = bool(self._workers)
        for index, worker in enumerate(self._workers):
            stdout = worker.stdout
            assert stdout is not None
            while self._given[index]:
                seconds = None if until == math.inf else max(until - time.monotonic(), 0.0)
                if not select.select([stdout], [], [], seconds)[0]:
                    return False
                answer = stdout.read(1)
                self._given[index] = self._given[index] - 1 if answer else 0  # it has died
                done &= answer == _COMPILED
        return done

    def close(self) -> None:
        """End them, whatever they do."""
        for worker in self._workers:
            worker.kill()
            with suppress(OSError, ValueError):  # of what it was not given any more
                worker.communicate()
        self._folder.cleanup()


_current: ContextVar[CompileWorkers | None] = ContextVar("who compiles beside this process", default=None)


@contextmanager
def compiling_beside(workers: CompileWorkers | None) -> Iterator[None]:
    """Let workers compile what :func:`compile_beside` meets in this context."""
    token = _current.set(workers)
    try:
        yield
    finally:
        _current.reset(token)


def compile_beside(run: Callable[[], object]) -> None:
    """Let workers, where there are some, compile the parts that a run would compile, and wait for them."""
    workers = _current.get()
    if workers is not None:
        with handing_over(workers.take):
            run()
        workers.wait()


def _work() -> None:
    """Compile what lies in files whose names come, one a line, and answer each by whether that was done."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print
    from torch._inductor.async_compile import maybe_warm_pool

    from . import fused_convolution  # noqa: F401  # with all operators of ours that graphs may have

    maybe_warm_pool()
    for path in sys.stdin:
        answer = b"0"
        with suppress(Exception):  # of a compiler, or an operator of the user's: who asked sees what fails
            compile_graph(*pickle.loads(Path(path.strip()).read_bytes()))
            answer = _COMPILED
        os.write(answers, answer)


if __name__ == "__main__":
    _work()
