"""Script: compiles heads with hidden layers for compute capability 9.0, prints the shared memory of each as JSON.

A process of its own, since the tests' has Triton's interpreter in the kernels' place.
"""

import json

import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch
from auxhead.kernels.fused_head import launch_fused_head
from auxhead.kernels.launch.choose_config import choose_config
from auxhead.kernels.launch.compile_only import compile_only
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.reference.hidden_layers import ACTIVATIONS, HiddenLayers

CHANNELS = 48
#: Samples, hidden features, classes, data type of each kind of layers: split, tiled, and with logits in memory.
SIZES = (
    (1, 33, 10, torch.float16),
    (17, 128, 10, torch.bfloat16),
    (17, 40, 1001, torch.float32),
    (1, 1024, 1000, torch.float16),
)


def layers(features: int, width: int, activation: str, dtype: torch.dtype) -> dict[str, HiddenLayers]:
    """Hidden layers of every kind, by name."""
    ones = torch.ones(features, dtype=dtype)
    linear = {"weight": torch.ones(width, features, dtype=dtype), "activation": activation}
    bias = torch.ones(width, dtype=dtype)
    return {
        "relu": HiddenLayers(rectifies=True),
        "norm": HiddenLayers(eps=1e-5, norm_weight=ones, norm_bias=ones),
        "linear": HiddenLayers(**linear),
        "relu, norm without parameters, linear": HiddenLayers(rectifies=True, eps=1e-5, bias=bias, **linear),
    }


def main() -> dict[str, int]:
    kernels = compile_only(90)
    found: dict[str, int] = {}

    def keep(name: str) -> None:
        (kernel,) = kernels
        found[name] = kernel.metadata.shared
        kernels.clear()

    one = torch.ones(1)
    for number, (samples, width, classes, dtype) in enumerate(SIZES):
        x = torch.zeros(samples, CHANNELS, 7, 7, dtype=dtype)
        view = head_view(tuple(x.shape), x.stride(), "avg", (1, 1))
        activation = list(ACTIVATIONS)[number]
        for name, hidden in [*layers(CHANNELS, width, activation, dtype).items()][number : number + 1]:
            inner = CHANNELS if hidden.weight is None else width
            weight, bias = torch.zeros(classes, inner, dtype=dtype), torch.zeros(classes, dtype=dtype)
            rows = classes if hidden.weight is None else width
            config = choose_config(
                view, rows, pool_max=False, dtype=dtype, device=x.device, place="alone", hidden=hidden
            )
            launch_fused_head(
                x, view, weight, bias, one, one,
                pool_max=False, return_probs=True, config=config, hidden=hidden,
            )  # fmt: skip
            where = f"{samples} samples, {width} features, {classes} classes, {activation}"
            keep(f"alone: {name}: {where}")
            plain = ExitHead(torch.zeros(classes, CHANNELS, dtype=dtype), None, one, one, "avg", (1, 1))
            heads = [ExitHead(weight, bias, one, one, "avg", (1, 1), hidden=hidden), plain]
            buffers = ExitBuffers.allocate(3, samples, classes, with_probs=True, device=x.device)
            told = torch.zeros(1, dtype=torch.int64)
            ExitLaunch(buffers, 0, heads, open_samples=told, condition=told)([x, x])
            keep(f"beside a plain head: {name}: {where}")
    return found


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
