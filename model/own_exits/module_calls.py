"""``watched_run``: one forward of a model, and every call of its layers with input, output and order."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..hooks import ThreadHook


class ModuleCall(NamedTuple):
    """One call of a layer; its times are places in the order of all beginnings and ends."""

    module: nn.Module
    began: int
    ended: int
    x: Tensor | None
    """The input, if that was one tensor and nothing else."""
    y: Any
    unchanged: bool
    """The output is a tensor that nobody has changed in place until the end of the forward."""

    def holds(self, other: "ModuleCall") -> bool:
        """Return whether the other call happened within this one, or is this one."""
        return self.began <= other.began and other.ended <= self.ended


def watched_run(model: nn.Module, x: Tensor) -> tuple[Any, list[ModuleCall]]:
    """Run ``model(x)`` without gradients and return its output and the calls of its layers in the order of their ends.

    Layers that are TorchScript take no hooks and are not seen; nor is a forward that is called by name.
    """
    time = 0
    open_calls: list[tuple[int, Tensor | None]] = []
    calls: list[tuple[ModuleCall, int | None]] = []

    def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal time
        time += 1
        alone = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        open_calls.append((time, args[0] if alone else None))

    def end(module: nn.Module, _args: Any, y: Any) -> None:
        nonlocal time
        time += 1
        began, given = open_calls.pop()
        counts = isinstance(y, Tensor) and not y.is_inference()
        calls.append((ModuleCall(module, began, time, given, y, False), y._version if counts else None))

    with ExitStack() as stack:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_pre_hook(ThreadHook(begin), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(ThreadHook(end)).remove)
        stack.enter_context(torch.inference_mode(False))  # tensors of inference mode do not count their versions
        stack.enter_context(torch.no_grad())
        output = model(x.clone(memory_format=torch.preserve_format))  # which it may change in place
    return output, [
        call._replace(unchanged=isinstance(call.y, Tensor) and (version is None or call.y._version == version))
        for call, version in calls
    ]
