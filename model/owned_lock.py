"""``OwnedLock``: a lock that no interrupt leaves held, if it is taken by ``with``."""

from _thread import RLock


class OwnedLock(RLock):  # type: ignore[misc]  # it may be subclassed, whatever the stubs say
    """A lock for one thread at a time, taken by ``with`` alone.

    An interrupt (Ctrl-C) is raised as a call returns. Up to Python 3.13 none is between the ``__enter__`` of a plain
    lock and the body of its ``with``; since 3.14 one is, and would leave the lock held. A lock that knows its owner can
    be released there without knowing whether it was taken.
    """

    def __enter__(self) -> bool:  # type: ignore[override]
        try:
            return self.acquire()
        except BaseException:
            try:
                self.release()
            except RuntimeError:  # it was not taken yet
                pass
            raise

    def is_mine(self) -> bool:
        """Return whether this thread has taken it."""
        return bool(self._is_owned())  # type: ignore[attr-defined]

    def is_taken(self) -> bool:
        """Return whether any thread has taken it."""
        if self.is_mine():
            return True
        if not self.acquire(blocking=False):
            return True
        self.release()
        return False
