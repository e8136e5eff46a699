"""Compiles launches without running them: for a GPU that is not here, or while it is busy."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ...kernels import library_product


def _no_product(features: Tensor, weight: Tensor) -> Tensor:
    return features.new_empty((len(features), len(weight)), dtype=torch.float32)


def compile_only(capability: int) -> list[Any]:
    """From now on, compile what this process launches on CPU tensors for a GPU instead of running it.

    Kernels are kept in Triton's cache on disk, where launches on such a GPU find them. There is no way back: this is
    for processes that do nothing else. Triton's interpreter must be off. Each launch appends its compiled kernel to
    the list that is returned.

    Args:
        capability: compute capability of the GPU, 90 for 9.0.
    """
    run, compiled = JITFunction.run, []

    def compile_launch(self: Any, *args: Any, **options: Any) -> Any:
        compiled.append(run(self, *args, **{**options, "warmup": True}))
        return compiled[-1]

    compiling_asks_for = {
        "get_current_target": lambda: GPUTarget("cuda", capability, 32),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda _device: 0,
    }
    driver.set_active(SimpleNamespace(**compiling_asks_for))
    library_product.product = _no_product
    JITFunction.run = compile_launch
    return compiled
