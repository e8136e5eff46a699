"""What an instrumented head kernel calls: the clock, and a row for each turn of a program; see ``residency``."""

import triton
import triton.language as tl


@triton.jit
def clock(INTERPRETED: tl.constexpr):
    """Return the nanoseconds of the device's clock, one for all multiprocessors; the interpreter has none: 0."""
    if INTERPRETED:
        now = tl.zeros((), tl.int64)
    else:
        now = tl.extra.cuda.globaltimer()
    return now


@triton.jit
def record_turn(residency, pid, start, INTERPRETED: tl.constexpr):
    """Write where the program ran that did the work numbered ``pid``, since when and until now; returns now."""
    tl.debug_barrier()  # the slowest warp keeps the program's place
    end = clock(INTERPRETED)
    if INTERPRETED:
        sm = tl.zeros((), tl.int32)
    else:
        sm = tl.extra.cuda.smid()
    row = residency + pid.to(tl.int64) * 3
    tl.store(row, sm.to(tl.int64))
    tl.store(row + 1, start)
    tl.store(row + 2, end)
    return end
