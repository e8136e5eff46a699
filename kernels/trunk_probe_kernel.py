"""A probe of where a GPU has room: very many tiny programs that keep a place for a moment, and say which and when."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .residency_kernel import clock, record_turn


@triton.jit
def trunk_probe_kernel(turns, hold):
    """Stay for ``hold`` nanoseconds of the device's clock, and write a row of ``turns`` [programs, 3] as heads do."""
    start = clock(False)
    now = start
    while now - start < hold:
        now = clock(False)
    record_turn(turns, tl.program_id(0), start, False)


def launch_trunk_probe(turns: Tensor, hold_ns: int) -> None:
    """Launch on the current stream as many programs of one warp as ``turns`` has rows.

    Args:
        turns: [programs, 3] int64 on a CUDA device, see :class:`~auxhead.kernels.residency.Residency`.
        hold_ns: for how long each keeps its place, nanoseconds, at least.
    """
    with torch.cuda.device_of(turns):
        trunk_probe_kernel[(len(turns),)](turns, hold_ns, num_warps=1)
