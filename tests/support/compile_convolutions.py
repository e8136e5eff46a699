"""Script: compiles convolutions with programs of each size for the compute capability given, and prints facts as JSON.

A process of its own, since the tests' has Triton's interpreter in the kernels' place.
"""

import json
import re
import sys

import torch
from auxhead.autotune.measuring.compile_only import compile_only
from auxhead.kernels import convolution, fused_conv2d


def main() -> None:
    """By block and window: bytes of shared memory, stages, and copies into it."""
    compiled = compile_only(int(sys.argv[1]))
    convolution.runs_triton = lambda _x: True
    x = torch.zeros(1, 64, 8, 8, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    found = []
    for block in convolution._BLOCKS:
        convolution._BLOCKS = (block,)
        for window in (1, 3):
            weight = x.new_zeros(64, 64, window, window).contiguous(memory_format=torch.channels_last)
            sizes = (1, 1), (window // 2, window // 2), (1, 1)
            with torch.no_grad():
                fused_conv2d(x, weight, x.new_zeros(64), sizes, 1, "silu", x)
            copies = len(re.findall(r"ttg.async_copy_global_to_local", compiled[-1].asm["ttgir"]))
            found.append({"stages": block.stages, "copies": copies, "shared": compiled[-1].metadata.shared})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
