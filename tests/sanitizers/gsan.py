"""Script: launches kernels under GSan, Triton's race detector, or a race: ``python gsan.py [planted]``.

``TRITON_INSTRUMENTATION_MODE=gsan`` has to be set. GSan watches memory of its own pool, and does not see what programs
hand over by inline assembly (``hand_over``): so of the heads only those are launched whose programs count arrivals, by
``ExitLaunch``, which allocates its counters where the caller does.
"""

import sys
from functools import partial

import launches
import torch
import triton
import triton.language as tl
from triton.experimental.gsan import create_mem_pool


@triton.jit
def all_write_one_number(out):
    tl.store(out, tl.program_id(0))


def main() -> int:
    """Launch in memory that is watched."""
    failed = 0
    with torch.cuda.use_mem_pool(create_mem_pool()):
        if sys.argv[1:] == ["planted"]:
            all_write_one_number[(64,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
        else:
            heads = [(name, partial(launches.run_way, config, 3)) for name, config in launches.COUNTED.items()]
            failed = launches.run_all([*heads, *launches.plain_cases()])
        torch.cuda.synchronize()
    print("launched: all")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
