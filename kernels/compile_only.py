"""Launches that are compiled and not run: for a GPU that is not here, or beside one that is busy."""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _Driver:
    """As much of a GPU's driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def settle_cache_keys() -> None:
    """Let kernels be found in Triton's cache on disk by all processes that call this before they launch any.

    In Triton 3.6 the key of a kernel depends on whether the functions that it calls have keys already, and the kernels
    share functions (github.com/triton-lang/triton/pull/10494). So keys are made in one order, whatever is launched
    first.
    """
    from . import exit_kernel, fused_head_kernel

    for kernel in (fused_head_kernel.fused_head_kernel, exit_kernel.exit_kernel):
        if isinstance(kernel, JITFunction):  # and not interpreted
            kernel.cache_key  # noqa: B018 -- made when it is first asked for


def compile_only(capability: int) -> list[Any]:
    """From now on, compile what this process launches on CPU tensors for a GPU instead of running it.

    Kernels are kept in Triton's cache on disk, where launches on such a GPU find them. There is no way back: this is
    for processes that do nothing else. Triton's interpreter must be off.

    Args:
        capability: of the GPU, 90 for 9.0.

    Returns:
        A list that gets the compiled kernel of each launch.
    """
    run, compiled = JITFunction.run, []

    def compile_it(self: Any, *args: Any, **options: Any) -> Any:
        compiled.append(run(self, *args, **{**options, "warmup": True}))
        return compiled[-1]

    driver.set_active(_Driver(capability))
    JITFunction.run = compile_it
    return compiled
