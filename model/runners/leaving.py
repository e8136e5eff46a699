"""``REQUEST``: keeps threads that Python leaves behind when it ends, daemons, out of runners.

From PyTorch such a thread would come back to a Python that is no more, which ends the process (``terminate``).
"""

import atexit
import sys
import time
from threading import Event, get_ident

#: Seconds to wait for requests under way, and then for threads to come with the next one.
_UNDER_WAY_S, _NEXT_S = 10.0, 0.1
#: The thread in which Python ends.
_ends_in: int | None = None
#: By thread that has asked a runner: whether it is in a request. One that was stopped is not here.
_asking: dict[int, bool] = {}


class _Request:
    """While open, this thread is in a request; while Python ends, a thread that opens one is stopped for good."""

    def __enter__(self) -> None:
        me = get_ident()
        if _ends_in not in (None, me):
            _asking.pop(me, None)
            Event().wait()
        _asking[me] = True

    def __exit__(self, *_: object) -> None:
        _asking[get_ident()] = False


REQUEST = _Request()


@atexit.register
def _stop_threads() -> None:
    """Wait until no other thread is in a request, nor, most likely, in anything else of PyTorch's."""
    global _ends_in
    _ends_in = get_ident()
    _asking.pop(_ends_in, None)
    began = time.monotonic()
    while others := [_asking[thread] for thread in sys._current_frames() if thread in _asking]:
        if time.monotonic() - began > (_UNDER_WAY_S if any(others) else _NEXT_S):
            break
        time.sleep(0.001)
