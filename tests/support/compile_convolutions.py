"""Script: compiles convolutions, max-pools and attention for the compute capability given, and prints facts as JSON.

A process of its own, since the tests' has Triton's interpreter in the kernels' place.
"""

import json
import re
import sys
from typing import Any

import torch
from auxhead.autotune.measuring.compile_only import compile_only
from auxhead.kernels import attend, attention, convolution, fused_conv2d, max_pool
from support.machine_code import disassembled

#: Instructions that read and write memory of the device.
ACCESS = re.compile(r"\b(LDG|LDGSTS|STG|RED|ATOMG|LD|ST)\b")


def main() -> None:
    """Of dense convolutions by block and window, of depthwise ones, of pools and attention."""
    capability = int(sys.argv[1])
    compiled = compile_only(capability)
    options = {"EARLY_START": True, "launch_pdl": True} if capability >= 90 else {"EARLY_START": False}
    for module in (attention, convolution, max_pool):
        module.runs_triton = lambda _x: True
    attention.early_start = convolution.early_start = lambda *_: options
    x = torch.zeros(1, 64, 8, 8, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    found = []
    for block in convolution._BLOCKS:
        convolution._BLOCKS = (block,)
        for window in (1, 3) if capability == 90 else (3,):  # on others, too, the one that takes more
            weight = x.new_zeros(64, 64, window, window).contiguous(memory_format=torch.channels_last)
            sizes = (1, 1), (window // 2, window // 2), (1, 1)
            fused_conv2d(x, weight, x.new_zeros(64), sizes, 1, "silu", x)
            found.append({"stages": block.stages, **facts(compiled[-1])})
    fused_conv2d(x, x.new_zeros(64, 1, 3, 3), x.new_zeros(64), ((1, 1), (1, 1), (1, 1)), 64, "silu")
    found.append(facts(compiled[-1]))
    max_pool.max_pool2d(x, 3, 2, 1)
    found.append(facts(compiled[-1]))
    query = torch.zeros(1, 2, 50, 64, dtype=torch.float16)
    attend(query, query, query, query.new_zeros(1, 2, 50, 50))
    found.append(facts(compiled[-1]))
    print(json.dumps(found))


def facts(kernel: Any) -> dict[str, Any]:
    """Bytes of shared memory, copies into it, and accesses before the wait for the launch before, if there is one."""
    before, wait, _ = disassembled(kernel).partition("ACQBULK")
    copies = len(re.findall(r"ttg.async_copy_global_to_local", kernel.asm["ttgir"]))
    early = len(ACCESS.findall(before)) if wait else None
    return {"kernel": kernel.name, "copies": copies, "shared": kernel.metadata.shared, "before the wait": early}


if __name__ == "__main__":
    with torch.no_grad():
        main()
