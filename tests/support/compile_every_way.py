"""Script: compiles every way to launch a head for compute capability 9.0, prints facts of the machine code as JSON.

A process of its own, since the tests' has Triton's interpreter in the kernels' place.
"""

import json
import re
import subprocess
from typing import Any

import torch
import triton
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch
from auxhead.kernels.fused_head import launch_fused_head
from auxhead.kernels.launch.choose_config import overriding
from auxhead.kernels.launch.compile_only import compile_only
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_config import LaunchConfig
from auxhead.kernels.launch.residency import recording

#: One of each way that a head can be launched, by name: samples, classes, configuration.
WAYS = {
    "one program a sample": (1, 10, LaunchConfig(1, 64, 1, 16, 1, 16, 1, 16, 1, stages=1, num_warps=4)),
    "split, the last to arrive adds up": (1, 1000, LaunchConfig(1, 16, 1, 64, 1, 1024, 4, 1024, 1, 1, 8)),
    "split, the last one waits": (1, 10, LaunchConfig(1, 16, 1, 64, 1, 16, 4, 16, 2, 1, 4, waits=True)),
    "tiles of a sample": (1, 1000, LaunchConfig(1, 16, 1, 64, 64, 64, 1, 1024, 1, 1, 8)),
    "tiles of 16 samples": (16, 1000, LaunchConfig(16, 64, 1, 16, 64, 64, 1, 1024, 1, 4, 4)),
    "tiles of 16 samples, weight in shared memory": (
        16,
        1000,
        LaunchConfig(16, 64, 1, 16, 64, 64, 2, 1024, 1, 4, 4, weight_buffers=3),
    ),
    "tiles that share the features": (16, 1000, LaunchConfig(16, 64, 1, 16, 16, 64, 4, 1024, 1, 1, 4)),
    "few programs for all": (1, 1000, LaunchConfig(1, 16, 1, 64, 64, 16, 1, 1024, 1, 1, 8, max_programs=16)),
    "tiles of 16 samples, maps in 4 parts": (16, 1000, LaunchConfig(16, 64, 1, 8, 64, 64, 1, 1024, 4, 1, 8)),
}
#: The one that is compiled while programs record where they run, too.
RECORDED = "one program a sample"


def compiled() -> dict[str, dict[str, int]]:
    """Launch in every way, alone and as two heads of a network, and return what each kernel is made of."""
    found = {}
    kernels = compile_only(90)
    for name, (samples, classes, config) in WAYS.items():
        for kernel, heads in zip(_launched(kernels, samples, classes, config), (1, 2), strict=True):
            found[f"{name}, {heads} of them"] = _made_of(kernel)
    with recording():
        for kernel, heads in zip(_launched(kernels, *WAYS[RECORDED]), (1, 2), strict=True):
            found[f"{RECORDED}, recorded, {heads} of them"] = _made_of(kernel)
    found["under patience"] = _made_of(_patient(kernels))
    return found


def _patient(kernels: list[Any]) -> Any:
    """Return what two heads behind another launch compile, the second of which exits under patience."""
    kernels.clear()
    x, weight, one = torch.zeros(8, 64, dtype=torch.float16), torch.zeros(10, 64, dtype=torch.float16), torch.ones(1)
    heads = [ExitHead(weight, None, one, one, "avg", (1, 1), criterion) for criterion in ("max_prob", "patience")]
    ExitLaunch(ExitBuffers.allocate(4, 8, 10, with_probs=True, device=x.device), 1, heads)([x, x])
    return kernels[0]


def _launched(kernels: list[Any], samples: int, classes: int, config: LaunchConfig) -> list[Any]:
    """Return what a head alone and two heads of a network compile; ``kernels``: all that is compiled goes there."""
    kernels.clear()
    x = torch.zeros(samples, 64, 7, 7, dtype=torch.float16).to(memory_format=torch.channels_last)
    weight, bias = torch.zeros(classes, 64, dtype=torch.float16), torch.zeros(classes, dtype=torch.float16)
    view = head_view(tuple(x.shape), x.stride(), "avg", (1, 1))
    launch_fused_head(x, view, weight, bias, 1.0, 0.5, pool_max=False, return_probs=True, config=config)
    shape = HeadShape.of(view, classes, pool_max=False, dtype=x.dtype)
    head = ExitHead(weight, bias, torch.ones(1), torch.ones(1), "avg", (1, 1))
    buffers = ExitBuffers.allocate(2, samples, classes, with_probs=True, device=x.device)
    with overriding({(shape, "network"): config}):
        ExitLaunch(buffers, 0, [head, head])([x, x])
    return list(kernels)


def _made_of(kernel: Any) -> dict[str, int]:
    path = f"{kernel.hash}.cubin"
    with open(path, "wb") as file:
        file.write(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    waits = len(re.findall(r"elementwise_inline_asm", kernel.asm["ttgir"]))
    copies = len(re.findall(r"ttg.async_copy_global_to_local", kernel.asm["ttgir"]))
    clocks = len(re.findall(r"%globaltimer|%smid", kernel.asm["ptx"]))
    torn = torn_warps(_disassembled(path)) if re.search(r"\batom\.", kernel.asm["ptx"]) else 0
    return {**numbers, "waits": waits, "copies": copies, "clocks": clocks, "torn warps": torn}


def _disassembled(path: str) -> str:
    """Return machine code as text, which takes a third of a second: without the analysis of data flow, a quarter."""
    listing = [triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf", path]
    return subprocess.run(listing, capture_output=True, text=True, check=True).stdout


def torn_warps(code: str) -> int:
    """Count the atomic additions in machine code that one thread makes and that its warp does not wait for.

    ptxas adds up what the threads of a warp add, behind a branch: BSSY before and BSYNC after make the warp one again.
    """
    torn = 0
    for place in re.finditer(r"ATOMG\S*\.ADD", code):
        branch = code.rfind("BRA `(.L_x_", 0, place.start())
        label = re.match(r"BRA `\((\.L_x_\d+)\)", code[branch:])
        target = -1 if label is None else code.find(f"{label[1]}:", place.end())
        if target >= 0:  # one that leads past it
            torn += "BSYNC" not in code[target : code.find("BAR.SYNC", target)]
    return torn


if __name__ == "__main__":
    print(json.dumps(compiled()))
