"""First launches of variants, in threads: each is compiled, and waited for, though not for ever."""

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from .failures import Failure
from .timers import Key

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
