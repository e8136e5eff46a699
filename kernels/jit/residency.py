"""Device functions by which a kernel records its programs' residency: the clock, and a row for each piece of work."""

import triton
import triton.language as tl

from .hand_over import INTERPRETED


@triton.jit
def clock():
    """Return the nanoseconds of the device's clock, one for all multiprocessors; the interpreter has none: 0."""
    return tl.zeros((), tl.int64) if INTERPRETED else tl.extra.cuda.globaltimer()


@triton.jit
def record_turn(residency, pid, start):
    """Write the row of work ``pid``: multiprocessor, ``start`` and now, in nanoseconds; returns now."""
    tl.debug_barrier()  # the slowest warp keeps the program's place
    end = clock()
    sm = tl.zeros((), tl.int32) if INTERPRETED else tl.extra.cuda.smid()
    row = residency + pid.to(tl.int64) * 3
    tl.store(row, sm.to(tl.int64))
    tl.store(row + 1, start)
    tl.store(row + 2, end)
    return end
