"""Script: compiles the rule's launches for compute capabilities, prints the shared memory of each as JSON.

A process of its own, since the tests' has Triton's interpreter in the kernels' place.
"""

import json
import os
import sys

import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch
from auxhead.kernels.fused_head import launch_fused_head
from auxhead.kernels.launch.compile_only import compile_only
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_rule import config_by_rule

#: Heads of ResNets, of every way that the rule has: samples, channels, height and width, classes, data type.
HEADS = (
    (1, 64, 56, 10, torch.float16),
    (128, 512, 7, 10, torch.float16),
    (1, 512, 7, 1000, torch.bfloat16),
    (8, 256, 56, 1000, torch.float16),
    (32, 2048, 7, 1000, torch.float16),
    (128, 64, 56, 1000, torch.bfloat16),
    (32, 512, 7, 1000, torch.float32),
)


def compiled(capability: int) -> dict[str, int]:
    """Launch heads alone and one of a network; bytes of shared memory of a program by name."""
    kernels = compile_only(capability)
    found: dict[str, int] = {}

    def keep(name: str) -> None:
        (kernel,) = kernels
        found[name] = kernel.metadata.shared
        kernels.clear()

    for samples, channels, size, classes, dtype in HEADS:
        x = torch.zeros(samples, channels, size, size, dtype=dtype).to(memory_format=torch.channels_last)
        weight, bias = torch.zeros(classes, channels, dtype=dtype), torch.zeros(classes, dtype=dtype)
        view = head_view(tuple(x.shape), x.stride(), "avg", (1, 1))
        config = config_by_rule(HeadShape.of(view, classes, pool_max=False, dtype=dtype))
        launch_fused_head(x, view, weight, bias, 1.0, 0.5, pool_max=False, return_probs=True, config=config)
        keep(f"{samples} x {channels} x {size} x {size}, {classes} classes, {dtype}")
    x = torch.zeros(8, 64, 14, 14, dtype=torch.float16).to(memory_format=torch.channels_last)
    head = ExitHead(torch.zeros(10, 256).half(), None, torch.ones(1), torch.ones(1), "max", (2, 2))
    buffers = ExitBuffers.allocate(2, 8, 10, with_probs=True, device=x.device)
    told = torch.zeros(1, dtype=torch.int64)
    ExitLaunch(buffers, 0, [head], open_samples=told, condition=told)([x])
    keep("a head of a network, which tells host and graph how many samples stay open")
    return found


def in_a_process(capability: int) -> dict[str, int]:
    """Compile in a process that was forked: there is no way back from compiling for a capability."""
    read, write = os.pipe()
    if os.fork() == 0:
        with os.fdopen(write, "w") as file:
            json.dump(compiled(capability), file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        printed = file.read()
    os.wait()
    return json.loads(printed)


if __name__ == "__main__":
    print(json.dumps({capability: in_a_process(int(capability)) for capability in sys.argv[1:]}))
