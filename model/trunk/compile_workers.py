"""``CompileWorkers``: processes that compile graphs beside this one, which then finds them in Inductor's caches.

Inductor compiles a backbone in ten to forty seconds, nearly all of it Python, of which threads run one at a time.
"""

import math
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from itertools import count as count_up
from pathlib import Path
from typing import Any

import torch

from .compiled_part import Compiled
from .inductor import TracedGraph, compile_graph, keep_triton_cache, mark_of, set_as, settings

#: Workers at most, and processors that each wants.
_MOST, _PROCESSORS = 8, 4
#: What a worker answers to a graph that it has compiled.
_COMPILED = b"1"
#: The argument of one that is patient.
_PATIENT = "patient"
#: Gigabytes that the machine must have, and the GPU must have free: a worker takes two and half of one.
_HOST_GB, _FREE_GB = 32.0, 8.0
#: A graph, and where it is to be once it is compiled.
Given = tuple[TracedGraph, Compiled]


def workers_for(device: torch.device) -> int:
    """Return how many workers this machine has room for."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    host_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9 if hasattr(os, "sysconf") else 0.0
    has_memory = device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > _FREE_GB * 1e9 and host_gb > _HOST_GB
    return min(_MOST, processors // _PROCESSORS) if has_memory else 0


class CompileWorkers:
    """Some processes with PyTorch of their own; what one of them cannot do is left undone, and not told."""

    def __init__(self, count: int, patient: bool = False) -> None:
        """Start as many, or as this machine lets; they take seconds to begin.

        Patient ones leave the processors to all others.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="auxhead-compile-")
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # Forked, Inductor's own processes, which compile kernels, need not import what a worker has imported already.
        inductors = {"TORCHINDUCTOR_COMPILE_THREADS": str(2 * _PROCESSORS), "TORCHINDUCTOR_WORKER_START": "fork"}
        # Each begins with Inductor, which sets another assembler before Triton asks for its version.
        version = keep_triton_cache()
        known_by = {} if version is None else {"TRITON_MOCK_PTX_VERSION": version}
        environment = {**os.environ, "PYTHONPATH": paths, **inductors, **known_by}
        self._workers: list[subprocess.Popen[bytes]] = []
        with suppress(OSError, TypeError):  # no memory for another one, no interpreter outside of this process
            while len(self._workers) < count:
                self._workers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __name__, *([_PATIENT] if patient else [])],
                        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                        bufsize=0, start_new_session=True,
                    )
                )  # fmt: skip
        self._given: list[deque[Given]] = [deque() for _ in self._workers]  # what is not answered yet, in order
        self._bytes = [0] * len(self._workers)  # of all graphs
        self._taken: set[Path] = set()
        self._has_failed = False
        self._names = count_up()

    def take(self, graph: TracedGraph, compiled: Compiled) -> None:
        """Give a graph to the worker that has the least, unless one has it, or some process has compiled it before.

        While this process waits for the workers it loads what they have compiled, and puts it among the ``compiled``.
        """
        if not self._workers:
            return
        index = self._bytes.index(min(self._bytes))
        path = Path(self._folder.name) / str(next(self._names))
        try:
            mark = mark_of(graph)
            if mark in self._taken or mark.exists():
                return
            path.write_bytes(pickle.dumps((settings(), graph)))
        except (OSError, TypeError, AttributeError, pickle.PicklingError):  # no room; a setting that stays here
            return
        self._taken.add(mark)
        self._given[index].append((graph, compiled))
        self._bytes[index] += len(graph.graph)
        stdin = self._workers[index].stdin
        assert stdin is not None
        with suppress(OSError):  # it has died
            stdin.write(f"{path}\n".encode())

    def wait(self, until: float = math.inf) -> bool:
        """Wait until workers have done what they could with all that was given, and return whether they compiled it.

        False if time is over before, too; ``until`` is by ``time.monotonic``.
        """
        while waiting := self._unanswered():
            seconds = None if until == math.inf else max(until - time.monotonic(), 0.0)
            answering = select.select([*waiting], [], [], seconds)[0]
            if not answering:
                return False
            for stdout in answering:
                answer, given = stdout.read(1), waiting[stdout]
                graph, compiled = given.popleft()
                self._has_failed |= answer != _COMPILED
                if answer == _COMPILED:
                    with suppress(Exception):  # whoever runs it sees it
                        compiled[graph] = compile_graph(graph)
                elif not answer:  # it has died
                    given.clear()
        return bool(self._workers) and not self._has_failed

    def _unanswered(self) -> dict[Any, deque[Given]]:
        """Return by the pipe of each worker what it has not answered yet."""
        pipes = [worker.stdout for worker in self._workers]
        return {pipe: given for pipe, given in zip(pipes, self._given, strict=True) if given}

    def close(self) -> None:
        """End them, whatever they do, and what they have forked."""
        for worker in self._workers:
            with suppress(ProcessLookupError):  # it has died
                os.killpg(worker.pid, signal.SIGKILL)
            with suppress(OSError, ValueError):  # of what it was not given any more
                worker.communicate()
        self._workers.clear()  # their numbers may be others' now
        self._given.clear()
        self._folder.cleanup()


def _work() -> None:
    """Compile what lies in files whose names come, one a line, and answer each by whether that was done."""
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever libraries print
    if _PATIENT in sys.argv:
        os.nice(19)
    from torch._inductor import compile_fx  # noqa: F401  # takes seconds
    from torch._inductor.async_compile import AsyncCompile

    from . import fused_convolution  # noqa: F401  # with all operators of ours that graphs may have

    os.register_at_fork(after_in_child=lambda: os.close(answers))  # else who waits would not see that this one died
    AsyncCompile.wait_pool_ready()
    parent = os.getppid()
    for path in sys.stdin:
        if os.getppid() != parent:  # killed: nobody waits for the rest
            return
        answer = b"0"
        with suppress(Exception):  # of a compiler, or an operator of the user's: who asked sees what fails
            given, graph = pickle.loads(Path(path.strip()).read_bytes())
            with set_as(given):
                compile_graph(graph)
            answer = _COMPILED
        os.write(answers, answer)


if __name__ == "__main__":
    _work()
