"""Copy speed of a device's own memory: a lower bound of the time that so many bytes take."""

from typing import NamedTuple

import torch

from ..measuring.timers import time_rounds
from ..records.comparison import Timings

#: Bytes of a copy: many times what a cache holds.
COPIED = 2**30
#: Copies between two events.
_REPEAT = 4


class CopySpeed(NamedTuple):
    """Copies within one device's memory, as they were timed."""

    us: Timings
    """Microseconds of a copy of ``COPIED`` bytes, which are read once and written once, [1][rounds]."""

    def floor(self, moved: int) -> Timings:
        """Return the microseconds that ``moved`` bytes, read or written, take at that speed, copy by copy."""
        return [[us * moved / (2 * COPIED) for us in rounds] for rounds in self.us]


def measure_copy_speed(device: torch.device, rounds: int) -> CopySpeed:
    """Time copies on a CUDA device; takes twice ``COPIED`` of its memory meanwhile."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device).random_()  # zeros may be faster
    target = torch.empty_like(source)
    times = time_rounds({"copy": [lambda: target.copy_(source)]}, device, rounds=rounds, repeat=_REPEAT)
    return CopySpeed(times["copy"])
