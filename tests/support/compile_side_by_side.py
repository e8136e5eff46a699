"""Script: compiles the launches of a network's heads for compute capability 9.0 from threads, and prints what it made.

A process of its own, since the tests' has Triton's interpreter in the kernels' place.
"""

import json

import torch
from auxhead.autotune.measuring.compile_only import compile_only
from auxhead.kernels import ExitBuffers
from auxhead.kernels.launch.residency import recording
from auxhead.kernels.noted import noting
from auxhead.model import FusedAuxHead
from auxhead.model.runners.program import HeadLaunches

if __name__ == "__main__":
    kernels = compile_only(90)
    heads = [FusedAuxHead(channels, 10).half().eval() for channels in (16, 32, 48)]
    outputs = [torch.zeros(2, channels, 7, 7, dtype=torch.float16) for channels in (16, 32, 48)]
    outputs.append(torch.zeros(2, 10, dtype=torch.float16))
    buffers = ExitBuffers.allocate(4, 2, 10, with_probs=False, device=torch.device("cpu"))
    exits = [*(head.as_exit_head() for head in heads), None]
    with torch.no_grad():
        HeadLaunches(buffers, exits, heads, (0, 1, 2)).compile(outputs, None)
        made = len(kernels)
        HeadLaunches(buffers, exits, heads, (0, 1, 2)).compile(outputs, None)
        with recording(), noting() as launches:  # which hold for what is launched from other threads, too
            HeadLaunches(buffers, exits, heads, (0, 1, 2)).compile(outputs, None)
    print(json.dumps({"made": made, "distinct": len({kernel.hash for kernel in kernels}), "noted": len(launches)}))
