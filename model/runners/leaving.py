"""``REQUEST``: keeps threads that Python leaves behind when it ends, daemons, out of runners.

From PyTorch such a thread would come back to a Python that is no more, which ends the process (``terminate``).
"""

import atexit
import sys
import time
from threading import Event, get_ident

#: Seconds to wait for requests under way, and then for threads to come with the next one.
_UNDER_WAY_S, _NEXT_S = 10.0, 0.1
#: By thread that has asked a runner, but for one that was stopped: whether it is in a request.
_asking: dict[int, bool] = {}
_ends_in: int | None = None


class _Request:
    """While open, this thread is in a request; while Python ends, other threads than that of the end are stopped."""

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
    global _ends_in
    _ends_in, began = get_ident(), time.monotonic()
    while states := [_asking[one] for one in {*sys._current_frames()} - {_ends_in} if one in _asking]:
        if time.monotonic() - began > (_UNDER_WAY_S if any(states) else _NEXT_S):
            break
        time.sleep(0.001)
