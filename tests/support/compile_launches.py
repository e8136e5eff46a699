"""Script: compiles launches for the compute capability given, and prints facts of their machine code as JSON.

A process of its own, since the tests' has Triton's interpreter in the kernels' place. For 9.0 heads that between them
have every way to be launched, hidden layers and recording; for others the largest that the rule launches. What packs
the features of one is "features of" it.
"""

import json
import re
import subprocess
import sys
from typing import Any

import torch
import triton
from auxhead.autotune.measuring.compile_only import compile_only
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, HiddenLayers
from auxhead.kernels.fused_head import launch_fused_head
from auxhead.kernels.launch.choose_config import choose_config, overriding
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_config import LaunchConfig
from auxhead.kernels.launch.residency import recording
from support.machine_code import disassembled, written

#: One of each way that a head can be launched, by name: samples, classes, configuration.
WAYS = {
    "split, the last to arrive adds up": (1, 1000, LaunchConfig(1, 16, 1, 64, 1, 1024, 4, 1024, 1, 1, 8)),
    "split, the last one waits": (1, 10, LaunchConfig(1, 16, 1, 64, 1, 16, 4, 16, 2, 1, 4, waits=True)),
    "tiles, few programs for all": (1, 1000, LaunchConfig(1, 16, 1, 64, 64, 16, 1, 1024, 1, 1, 8, max_programs=16)),
    "tiles of 16 samples, maps in 4 parts": (16, 1000, LaunchConfig(16, 64, 1, 8, 64, 64, 1, 1024, 4, 1, 8)),
    "tiles of 16 samples": (16, 1000, LaunchConfig(16, 64, 1, 16, 64, 64, 1, 1024, 1, 4, 4)),
    "tiles of 16 samples, weight in shared memory": (
        16, 1000, LaunchConfig(16, 64, 1, 16, 64, 64, 2, 1024, 1, 4, 4, weight_buffers=3),
    ),
    "packed": (16, 1000, LaunchConfig(16, 64, 1, 16, 64, 64, 1, 1024, 1, 1, 8, weight_buffers=3, features="packed")),
    "in place": (16, 10, LaunchConfig(16, 16, 8, 1, 128, 16, 8, 16, 1, 1, 4, weight_buffers=3, features="in place")),
}  # fmt: skip


def image(samples: int, channels: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(samples, channels, 7, 7, dtype=dtype).to(memory_format=torch.channels_last)


def launch_alone(
    x: torch.Tensor, classes: int, config: LaunchConfig | None = None, hidden: HiddenLayers | None = None,
    pool: str = "avg", size: int = 1,
) -> None:  # fmt: skip
    """Launch a head of zeros, by the rule unless a configuration is given."""
    hidden = HiddenLayers() if hidden is None else hidden
    features = x[0].numel() if pool == "none" else x.shape[1] * size * size
    width = features if hidden.weight is None else hidden.weight.shape[0]
    weight, bias = torch.zeros(classes, width, dtype=x.dtype), torch.zeros(classes, dtype=x.dtype)
    view, pool_max = head_view(tuple(x.shape), x.stride(), pool, (size, size)), pool == "max"
    options = {"dtype": x.dtype, "device": x.device, "hidden": hidden}
    config = config or choose_config(view, classes, pool_max=pool_max, **options)
    launch_fused_head(
        x, view, weight, bias, 1.0, 0.5, pool_max=pool_max, return_probs=True, config=config, hidden=hidden
    )  # fmt: skip


def launch_network(x: torch.Tensor, classes: int, config: LaunchConfig | None, *hidden: HiddenLayers) -> None:
    """Launch heads of zeros behind another launch, the first with a configuration, the last under patience."""
    view, one = head_view(tuple(x.shape), x.stride(), "avg", (1, 1)), torch.ones(1)
    shape = HeadShape.of(view, classes, pool_max=False, dtype=x.dtype)
    heads = [
        ExitHead(
            torch.zeros(classes, x.shape[1] if own.weight is None else own.weight.shape[0], dtype=x.dtype), None,
            one, one, "avg", (1, 1), criterion, own,
        )
        for own, criterion in zip((HiddenLayers(), *hidden), ("max_prob", "patience"), strict=False)
    ]  # fmt: skip
    buffers = ExitBuffers.allocate(4, len(x), classes, with_probs=True, device=x.device)
    told = torch.zeros(1, dtype=torch.int64)
    with overriding({} if config is None else {shape: config}):
        ExitLaunch(buffers, 1, heads, open_samples=told, condition=told)([x] * len(heads))


def every_way(kernels: list[Any]) -> dict[str, dict[str, int]]:
    found = {}

    def keep(name: str) -> None:
        *packs, kernel = kernels
        found[name] = made_of(kernel)
        for one in packs:
            found[f"features of {name}"] = made_of(one)
        kernels.clear()

    for name, (samples, classes, config) in WAYS.items():
        launch_alone(image(samples, 64), classes, config, pool="none" if config.in_place else "avg")
        keep(name)
    for size in (1, 2):  # blocks of which nobody has made a layout of shared memory
        launch_alone(torch.zeros(64, 64, size, 3, dtype=torch.float16)[..., :2], 1000, pool="none")
        keep(f"in place, maps of {size}x2")
    ones, first = torch.ones(48, dtype=torch.float16), torch.ones(33, 48, dtype=torch.float16)
    launch_alone(image(1, 48), 10, hidden=HiddenLayers(True, 1e-5, ones, ones, first, None, "gelu"))
    keep("hidden layers")
    launch_alone(image(8, 64), 1000, hidden=HiddenLayers(weight=torch.ones(128, 64, dtype=torch.float16)))
    keep("tiles of a last layer")
    launch_alone(torch.zeros(16, 2100, dtype=torch.float16), 1000, hidden=HiddenLayers(False, 1e-5), pool="none")
    keep("in place, a norm")
    launch_alone(torch.zeros(32, 192, dtype=torch.float16), 21843, pool="none")
    keep("in place, slices of many classes")
    launch_alone(image(8, 512, torch.float32), 10_000)
    keep("packed, slices of many classes")
    maps = torch.zeros(32, 128, 28, 28, dtype=torch.float16)
    for name, x in (("", maps), (" of a channels-last map", maps.to(memory_format=torch.channels_last))):
        launch_alone(x, 1000, pool="max", size=6)
        keep(f"packed, large maxima{name}")
    with recording():
        linear = HiddenLayers(weight=first, activation="hardswish")
        launch_network(image(1, 48), 10, WAYS["split, the last one waits"][2], linear)
    keep("two of a network, recorded")
    return found


def made_of(kernel: Any) -> dict[str, int]:
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run([tool, "-res-usage", written(kernel)], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counted = {
        "waits": len(re.findall(r"elementwise_inline_asm", kernel.asm["ttgir"])),
        "meetings": len(
            re.findall(r"elementwise_inline_asm[^\n]*\n(?:(?!.*scf\.).*\n)*.*\.barrier", kernel.asm["ttgir"])
        ),
        "copies": len(re.findall(r"ttg.async_copy_global_to_local", kernel.asm["ttgir"])),
        "clocks": len(re.findall(r"%globaltimer|%smid", kernel.asm["ptx"])),
        "torn warps": torn_warps(disassembled(kernel)) if re.search(r"\batom\.", kernel.asm["ptx"]) else 0,
    }
    return {**numbers, **counted, "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}


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


def by_rule(kernels: list[Any]) -> dict[str, dict[str, int]]:
    """Launch heads that take most memory, alone and in a network; bytes of shared memory by place and kernel."""
    launch_alone(image(32, 2048), 1000)
    launch_network(image(8, 64, torch.bfloat16), 1000, None)
    launch_alone(image(32, 512, torch.float32), 1000, hidden=HiddenLayers(weight=torch.ones(256, 512)))
    launch_alone(image(256, 2048), 21843)
    return {f"{place}: {one.name}": {"shared": one.metadata.shared} for place, one in enumerate(kernels)}


if __name__ == "__main__":
    capability = int(sys.argv[1])
    kernels = compile_only(capability)
    print(json.dumps(every_way(kernels) if capability == 90 else by_rule(kernels)))
