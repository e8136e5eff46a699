"""Triton function by which a launch begins while the one before it ends: a programmatic dependent launch.

https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
"""

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # no Triton for NVIDIA's GPUs
    gdc_wait = gdc_launch_dependents = None


@triton.jit
def await_launch_before(EARLY_START: tl.constexpr):
    """Wait until what launches before this one wrote can be read; then let the next launch come as far as this line.

    It stands before the first read and the first write. As the next one waits for all of this launch, which has waited
    for all before it, nothing is read too early, nor overwritten, however many launches follow each other so.
    """
    if EARLY_START:
        gdc_wait()
        gdc_launch_dependents()
