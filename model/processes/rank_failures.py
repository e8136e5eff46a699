"""``Watch``: tells each of several processes when another fails or dies, and ends it within a bounded time.

Of two threads one asks the store that the processes share, and may wait for a host that is gone; the other one judges.
"""

import _thread
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

#: Seconds between two looks at the store.
_POLL_S = 0.5
#: A process without a heartbeat for so long is taken for dead. torchrun kills the others 30 s after it saw the first
#: die, and they are to end before, with the cause named.
_SILENT_S = 15.0
#: The same where something has failed already, and the question is who.
_SILENT_AFTER_A_FAILURE_S = 2.0
#: A process that is told of a failure by its own exchange needs no interruption, and gets so long to see it.
_NOTICE_S = 1.0
#: So long a process may take to leave what it does, before it is ended.
_LEAVE_S = 6.0
#: So long a process that lost its connection waits to be told why.
_ATTRIBUTE_S = 4.0

_LEFT = b"left"
_BY_SIGTERM = "torchrun, or somebody else, has ended this process by SIGTERM"


class RankFailed(RuntimeError):
    """Another process of the group failed or died; the message names it and the cause."""


class _Interrupted(BaseException):
    """Takes the main thread out of what it does, through handlers of exceptions that are none of it."""


def in_words(error: BaseException) -> str:
    """Return an error in one line, with its kind where it is not about what the user gave."""
    return " ".join((str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}").split())


def _end(cause: str) -> NoReturn:
    """End the process with an error, whatever its threads wait for."""
    sys.stdout.flush()
    sys.stderr.write(f"Error: {cause}\n")  # at once: others write to the same terminal
    sys.stderr.flush()
    os._exit(1)


class Watch:
    """Heartbeats of processes and the first failure, in the store that they share; a thread looks at them.

    While it is open, in the main thread, a process that fails says so to the others (see :meth:`failures`); one that
    is told and does not end by itself, because it waits for a device or a connection, is ended.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int) -> None:
        # a connection of its own: a call that waits holds the other; stubs lack the method
        self._store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._ranks = rank, ranks
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._asking = threading.Thread(target=self._ask, daemon=True, name="auxhead rank store")
        self._judging = threading.Thread(target=self._judge, daemon=True, name="auxhead rank watch")
        # Looks of the judge since the store last answered, which do not go on in a process that is stopped itself
        self._unanswered = 0
        self._limit: tuple[float, str] | None = None
        self._cause: str | None = None
        self._began = self._known_at = self._leaving_since = 0.0
        self._interruptible = True
        self._left = self._reported = False
        self._before: Any = None

    def __enter__(self) -> "Watch":
        """Begin to watch; SIGTERM, by which torchrun ends a process when another has ended, becomes an error."""
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        self._began = time.monotonic()
        self._beat(b"0")
        self._asking.start()
        self._judging.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop watching; after a failure of its own once the others had the time to end by themselves."""
        while self._reported and time.monotonic() < self._known_at + _LEAVE_S and not self._all_left():
            time.sleep(0.05)
        self._closed.set()
        self._judging.join()
        self._asking.join(_LEAVE_S)
        # torchrun ends this process, too, when the first one has failed, and the error is not yet printed
        signal.signal(signal.SIGTERM, self._before if kind is None else signal.SIG_IGN)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Tell the others of an error that leaves the body.

        An error that comes of a failure elsewhere, a lost connection say, is not raised: once the body is left, its
        files closed, the process ends with the cause on stderr. PyTorch would wait, and Python's threads with it, for
        exchanges that are under way. A process that comes to the end of the body waits for the others to do so.

        Raises:
            RankFailed: another process has failed while this one waited for it.
        """
        try:
            yield
            self._interruptible = False
            self._wait_for_others()
        except BaseException as error:
            cause = self._tell(error)
            if cause is not None:
                self._leave()
                _end(cause)
            raise
        finally:
            self._leave()

    @contextmanager
    def told_before(self) -> Iterator[None]:
        """Tell the others of an error that leaves the body at once, before what is open around it is closed.

        That may wait for another process. Once an error is told, this one ends within seconds, whatever it waits for.
        """
        try:
            yield
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> str | None:
        """Tell the others of an error, once.

        Returns:
            The failure of another process that the error comes of, of which nobody is told; None if it is this one's.
        """
        self._interruptible = False
        if self._reported or isinstance(error, RankFailed):
            return None
        cause = self.cause_elsewhere(error) if isinstance(error, (RuntimeError, _Interrupted)) else None
        if cause is None:
            self._report(error)
        return cause

    @contextmanager
    def within(self, seconds: float, late: str) -> Iterator[None]:
        """Limit the time of the body, which may wait for the others without end; ``late`` is the cause if it does."""
        self._limit = time.monotonic() + seconds, late
        try:
            yield
        finally:
            self._limit = None

    def check(self) -> None:
        """Raise ``RankFailed`` if another process is known to have failed or died."""
        if self._cause is not None:
            raise RankFailed(self._cause)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._interruptible and sys.exc_info()[1] is not None:
            # an error is on its way to ``failures`` already, and another one could pass by it on the way
            self._leaving_since = self._leaving_since or time.monotonic()
        elif self._interruptible:
            self._interruptible = False
            raise _Interrupted(self._cause)

    def _ask(self) -> None:
        """Beat and look until the watch is closed."""
        number = 0
        while not self._closed.wait(_POLL_S):
            number += 1
            try:
                self._beat(str(number).encode())
                if self._cause is None:
                    self._look(_SILENT_S)
            except RuntimeError:
                if not self._left:  # else whoever holds it has come to its end, too
                    self._learn("the store of the processes cannot be reached: torchrun, or rank 0, has ended")
            self._unanswered = 0

    def _judge(self) -> None:
        """See until the watch is closed whether the process has to be ended."""
        interrupted = False
        while not self._closed.wait(_POLL_S):
            self._unanswered += 1
            if self._unanswered * _POLL_S > _SILENT_S:
                self._learn("the store of the processes does not answer: the host of rank 0 is gone, or the way to it")
            limit = self._limit
            if limit is not None and time.monotonic() > limit[0]:
                self._learn(limit[1])
            if self._leaving_since and time.monotonic() > self._leaving_since + _LEAVE_S:
                self._learn(_BY_SIGTERM)
            if self._cause is None:
                continue
            waited = time.monotonic() - self._known_at
            if waited > _NOTICE_S + _LEAVE_S:
                _end(self._cause)
            if waited > _NOTICE_S and self._interruptible and not interrupted:
                interrupted = True
                _thread.interrupt_main(signal.SIGTERM)

    def _beat(self, value: bytes) -> None:
        with self._lock:
            if not self._left:
                self._store.set(f"beat/{self._rank}", value)

    def _leave(self) -> None:
        """Say that this process has come to its end, so that nobody waits for its heartbeat."""
        with self._lock:
            self._left = True
            with suppress(RuntimeError):  # gone with whoever held it: nobody is left to be told
                self._store.set(f"beat/{self._rank}", _LEFT)

    def _look(self, silent: float) -> None:
        """Learn the first failure that another process reported, or which one has had no heartbeat for too long."""
        with self._lock:
            if self._store.check(["failure"]):
                failure = json.loads(self._store.get("failure"))
                if failure["rank"] != self._rank:
                    self._learn(f"rank {failure['rank']} failed: {failure['text']}")
                return
            now = time.monotonic()
            for rank in self._others():
                value = self._store.get(f"beat/{rank}")
                if value != self._beats.get(rank, (b"", now))[0]:
                    self._beats[rank] = value, now
                elif value != _LEFT and now - self._beats[rank][1] > silent:
                    self._learn(f"rank {rank} of {self._ranks} has died or hangs: it has not been heard of for a while")
                    return

    def _others(self) -> list[int]:
        """Return the other processes that have begun to watch."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        return [rank for rank in others if self._store.check([f"beat/{rank}"])]

    def _learn(self, cause: str) -> None:
        if self._cause is None:
            self._known_at, self._cause = time.monotonic(), cause

    def _wait_for_others(self) -> None:
        """Wait until all others have come to their end.

        Raises:
            RankFailed: one of them has failed or died.
        """
        self._leave()
        while self._cause is None and not self._all_left():
            time.sleep(0.05)
        if self._cause is None:
            with suppress(RuntimeError):  # the store is gone with the process that held it, and had come to its end
                self._look(_SILENT_S)  # one that failed has said so before it left
        if self._cause is not None:
            raise RankFailed(self._cause)

    def _all_left(self) -> bool:
        """Return whether all others have come to their end; those that have not come yet, too, in the first seconds."""
        try:
            with self._lock:
                come = self._others()
                if len(come) < self._ranks - 1 and time.monotonic() < self._began + _LEAVE_S:
                    return False
                return all(self._store.get(f"beat/{rank}") == _LEFT for rank in come)
        except RuntimeError:
            return True

    def cause_elsewhere(self, error: BaseException) -> str | None:
        """Return the failure of another process that an error comes of; None for an error of this one's own.

        A lost connection is a RuntimeError of any wording, and comes before the reason does.
        """
        until = time.monotonic() + _ATTRIBUTE_S
        while self._cause is None and time.monotonic() < until:
            try:
                self._look(_SILENT_AFTER_A_FAILURE_S)
            except RuntimeError:
                break
            time.sleep(0.1)
        if self._cause is None and isinstance(error, _Interrupted):
            return _BY_SIGTERM
        return self._cause

    def _report(self, error: BaseException) -> None:
        """Tell the others, which end by themselves before torchrun, seeing this one end, ends them."""
        text = in_words(error)
        try:
            self._store.compare_set("failure", "", json.dumps({"rank": self._rank, "text": text}))
        except RuntimeError:  # gone with whoever held it: nobody is left to be told
            return
        self._learn(text)
        self._reported = True
