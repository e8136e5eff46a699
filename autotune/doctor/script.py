"""Runs a script until a few of its requests, or steps of training, are timed, watched and profiled; then ends it.

A request begins with each call of one module: the first that the script calls a second time, not from within another.
It lasts until the next one begins, so that a step of training has its backward pass and its optimizer in it. Calls that
are captured into a graph run nothing, and are none; nor are those of other threads than the one that calls it first.
"""

import dataclasses
import runpy
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import record_function

from ...model.basics.bad_input import BadInput
from ..measuring.cuda_calls import ANNOTATION
from .profile_live import profiler, without_tf32, write_trace
from .user_code import UserCodeError, user_code
from .watching.collections import CollectionWatcher
from .watching.loads import LoadWatcher
from .watching.watcher import Watcher, is_capturing

#: Requests before any that count, and those that are then timed, profiled and watched, one behind another; the first
#: profiled one pays for the profiler and is thrown away.
WARM_UP, TIMED, PROFILED, WATCHED = 4, 5, 4, 4
#: How often the module has to be called: requests end where the next one begins.
CALLS = WARM_UP + TIMED + PROFILED + WATCHED + 1


class _Seen(BaseException):
    """Ends a script, of which enough was seen; no Exception, so that a script catches it as little as Ctrl-C."""


def profile_script(script: Path, arguments: Sequence[str], file: Path) -> str:
    """Run a script as ``python script.py arguments`` would, and write the trace of its requests.

    Args:
        script: runs as ``__main__``, its folder first on the path.
        arguments: for it.
        file: the Chrome trace, see :func:`profile_live`.

    Returns:
        The class of the module whose calls begin requests.

    Raises:
        BadInput: the script ended before that module was called often enough.
        UserCodeError: it raised an error, or left with a status other than 0.
    """
    requests, before = _RequestHooks(file), (sys.argv, sys.path)
    sys.argv, sys.path = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with requests, user_code(f"SCRIPT: {script}"):
            _run_to_its_end(script)
    except (_Seen, UserCodeError):
        if not requests.are_seen:
            raise
    finally:
        sys.argv, sys.path = before
    if requests.are_seen:
        return type(requests.module).__name__
    raise BadInput(
        f"{script}: {requests.in_words()}; wants {CALLS} calls at least, {CALLS - 1} whole requests and the begin of "
        "one more: let it do more requests or steps"
    )


def _run_to_its_end(script: Path) -> None:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise


def is_captured() -> bool:
    """Return whether what runs now is captured into a graph."""
    return torch.cuda.is_initialized() and is_capturing()


class _RequestHooks:
    """Hooks of all modules, which tell requests apart, and what is done in each."""

    def __init__(self, file: Path) -> None:
        self.module: nn.Module | None = None
        self.are_seen = False
        self._thread: int | None = None  # that calls the module
        self._file, self._calls, self._depth = file, 0, threading.local()
        self._called: list[nn.Module] = []
        self._lock = threading.Lock()
        self._begins: list[float] = []
        self._collections, self._loads = CollectionWatcher(), LoadWatcher()
        self._opened, self._annotation = ExitStack(), ExitStack()

    def __enter__(self) -> None:
        self._main: int | None = threading.get_ident()
        self._handler = signal.signal(signal.SIGUSR1, self._end_main)
        self._hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._main = None
        signal.signal(signal.SIGUSR1, self._handler)
        for hook in self._hooks:
            hook.remove()
        if self._thread in (None, threading.get_ident()):  # what another thread has opened ends with the process
            self._annotation.close()
            self._opened.close()

    def in_words(self) -> str:
        """Say what was called."""
        if self.module is not None:
            return f"called {type(self.module).__name__} {self._calls} times"
        names = ", ".join(dict.fromkeys(type(one).__name__ for one in self._called))
        return f"called {names}, each once" if names else "called no torch.nn.Module"

    def _enter(self, module: nn.Module, arguments: object) -> None:
        self._depth.calls = getattr(self._depth, "calls", 0) + 1
        if self._depth.calls > 1 or torch.compiler.is_compiling() or is_captured():
            return
        with self._lock:
            if self.module is None:
                if any(module is one for one in self._called):
                    self.module, self._calls, self._thread = module, 1, threading.get_ident()
                self._called.append(module)
        if module is self.module and self._thread == threading.get_ident():
            self._calls += 1
            self._begin(self._calls - WARM_UP - 1)

    def _leave(self, module: nn.Module, arguments: object, output: object) -> None:
        self._depth.calls -= 1

    def _begin(self, index: int) -> None:
        """Begin the request of an index, warm-up ones below 0."""
        if 0 <= index <= TIMED:
            if index in (0, TIMED):
                torch.cuda.synchronize()
            if index == 0:
                self._opened.enter_context(self._collections)
                self._opened.enter_context(self._loads)
            self._collections.request = self._loads.request = index
            self._begins.append(time.perf_counter())
        index -= TIMED
        if index == 0:
            self._opened.close()  # of collections and loads
            self._profiler = self._opened.enter_context(profiler())
        elif index == 1:
            torch.cuda.synchronize()
            self._profiler.step()
        self._annotation.close()
        if 1 <= index < PROFILED:
            self._annotation.enter_context(record_function(ANNOTATION))
        index -= PROFILED
        if index == 0:
            torch.cuda.synchronize()
            self._opened.close()  # the profiler
            self._watcher = self._opened.enter_context(Watcher())
        elif index == WATCHED:
            self._write()
            self.are_seen = True
            self._end()

    def _end(self) -> None:
        """End the script, of which the main thread may be waiting for this one."""
        if self._main == threading.get_ident():
            raise _Seen
        while self._main is not None:  # a signal is lost if it comes just before the main thread begins to wait
            with self._lock:
                if self._main is not None:
                    signal.pthread_kill(self._main, signal.SIGUSR1)
            time.sleep(0.05)
        raise SystemExit  # which ends a thread without a word

    def _end_main(self, *_: object) -> None:
        if self._main is not None:
            raise _Seen

    def _write(self) -> None:
        torch.cuda.synchronize()
        times = [1e6 * (after - before) for before, after in zip(self._begins, self._begins[1:], strict=False)]
        watched = dataclasses.replace(
            self._watcher.watched(requests=WATCHED),
            host_us=statistics.median(times),
            samples_us=tuple(times),
            back_to_back=True,
            collections=tuple(self._collections.seen),
            loads=self._loads.seen,
            without_tf32=without_tf32(),
        )
        self._opened.close()
        write_trace(self._profiler, watched, self._file)
