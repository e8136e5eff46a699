"""``Worker``: a thread for what may wait for another process, so that the caller hears of failures meanwhile."""

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """Runs what it is given, one after another.

    It is no executor of ``concurrent.futures``: Python waits for the threads of those when it ends, and one may be
    waiting for a process that has died.
    """

    def __init__(self, name: str) -> None:
        """Start the thread, under a name for people."""
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run a function there; the future gets what it returns or raises."""
        future: Future[Any] = Future()
        self._work.put((function, future))
        return future

    def end(self) -> None:
        """End the thread once it has done what it was given; does not wait."""
        self._work.put(None)

    def leave_behind(self) -> None:
        """Let the process end, by ``os._exit``, without a thread that has been ended and still waits.

        Python's own end would let it come back to an interpreter that is none, which aborts the process.
        """
        if self._thread.is_alive():
            atexit.register(self._exit_beside)

    def _exit_beside(self) -> None:
        if self._thread.is_alive():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            function, future = given
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del given, function, future  # an answer of the user's, while it waits for the next
