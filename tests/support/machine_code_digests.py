"""Script: compiles ``max_prob`` heads as the H200's table launches them, prints digests of their code as JSON.

Of PTX without line numbers: what ptxas makes of it is the same whenever it is. A process of its own, since the tests'
has Triton's interpreter in the kernels' place.
"""

import hashlib
import json
from pathlib import Path

import torch
import triton
from auxhead.autotune.measuring.compile_only import compile_only
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch
from auxhead.kernels.fused_head import launch_fused_head
from auxhead.kernels.launch.choose_config import overriding
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_config import LaunchConfig
from auxhead.kernels.launch.tuned_table import config_from, table_path
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend

#: Heads of ResNets: samples, channels, height and width, classes, data type; a way to multiply each, in turns alone
#: and in a network, whose kernels multiply by the same functions.
HEADS = (
    (1, 64, 56, 10, torch.float16, False),
    (1, 512, 7, 1000, torch.bfloat16, True),
    (32, 2048, 7, 1000, torch.float16, True),
    (32, 512, 7, 1000, torch.float32, False),
)


def measured(shape: HeadShape) -> LaunchConfig:
    """Return the table's configuration, whatever kernel it is of."""
    rows = json.loads(Path(table_path("NVIDIA H200")).read_text())["entries"]
    (config,) = [row["config"] for row in rows if HeadShape(**row["shape"]) == shape]
    return config_from(config, shape)


def image(samples: int, channels: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(samples, channels, size, size, dtype=dtype).to(memory_format=torch.channels_last)


def main() -> dict[str, str]:
    triton.knobs.compilation.disable_line_info = True
    CUDABackend.make_cubin = lambda *_: b""  # which nobody looks at
    kernels = compile_only(90)
    found: dict[str, str] = {}

    def keep(name: str) -> None:
        (kernel,) = kernels
        found[name] = hashlib.sha256(kernel.asm["ptx"].encode()).hexdigest()[:16]
        kernels.clear()

    for samples, channels, size, classes, dtype, in_network in HEADS:
        x, one = image(samples, channels, size, dtype), torch.ones(1)
        weight, bias = torch.zeros(classes, channels, dtype=dtype), torch.zeros(classes, dtype=dtype)
        view = head_view(tuple(x.shape), x.stride(), "avg", (1, 1))
        shape = HeadShape.of(view, classes, pool_max=False, dtype=dtype)
        if in_network:
            head = ExitHead(weight, bias, one, one, "avg", (1, 1))
            buffers = ExitBuffers.allocate(3, samples, classes, with_probs=True, device=x.device)
            told = torch.zeros(1, dtype=torch.int64)
            with overriding({shape: measured(shape)}):
                ExitLaunch(buffers, 0, [head, head], open_samples=told, condition=told)([x, x])
        else:
            launch_fused_head(
                x, view, weight, bias, one, one, pool_max=False, return_probs=True, config=measured(shape)
            )
        place = "two of a network" if in_network else "alone"
        keep(f"{place}: {samples} x {channels} x {size} x {size}, {classes} classes, {dtype}")
    x = image(8, 256, 14, torch.float16)
    head = ExitHead(torch.zeros(10, 256).half(), None, torch.ones(1), torch.ones(1), "avg", (1, 1))
    buffers = ExitBuffers.allocate(2, 8, 10, with_probs=False, device=x.device)
    shape = HeadShape.of(head_view(tuple(x.shape), x.stride(), "avg", (1, 1)), 10, pool_max=False, dtype=x.dtype)
    with overriding({shape: measured(shape)}):
        ExitLaunch(buffers, 0, [head, None])([x, torch.zeros(8, 10).half()])
    keep("the last head of a network and its classifier")
    return found


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
