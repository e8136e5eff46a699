"""Compiles launches without running them: for a GPU that is not here, or while it is busy."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ...kernels import before_launch


def _nothing(head: before_launch.HeadInput, x: Tensor) -> Tensor:
    return x.new_empty((len(x), len(head.weight)), dtype=torch.float32)


def compile_only(capability: int) -> list[Any]:
    """From now on, compile what this process launches on CPU tensors for a GPU instead of running it.

    Kernels are kept in Triton's cache on disk, where launches on such a GPU find them. There is no way back: this is
    for processes that do nothing else. Triton's interpreter must be off. Each launch of a kernel, of which some heads
    have two, appends what is compiled to the list that is returned.

    Args:
        capability: compute capability of the GPU, 90 for 9.0.
    """
    run, compiled = JITFunction.run, []

    def compile_launch(self: Any, *args: Any, **options: Any) -> Any:
        compiled.append(run(self, *args, **{**options, "warmup": True}))
        return compiled[-1]

    def launch_compiled(self: CompiledKernel, _grid: object) -> Callable[..., None]:
        return lambda *_args, **_options: compiled.append(self)

    compiling_asks_for = {
        "get_current_target": lambda: GPUTarget("cuda", capability, 32),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda _device: 0,
    }
    driver.set_active(SimpleNamespace(**compiling_asks_for))
    before_launch.logits_by_library = _nothing  # PyTorch compiles nothing, and on the CPU may take minutes
    JITFunction.run = compile_launch
    CompiledKernel.__getitem__ = launch_compiled  # by heads that know what theirs was compiled to
    return compiled
