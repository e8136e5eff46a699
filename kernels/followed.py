"""``is_followed``: tells whether somebody follows operations and not their answers alone: modes, tracers, exporters."""

import torch
from torch.autograd import forward_ad


def is_followed() -> bool:
    """Return whether a mode, a transform or a tracer sees or changes operations of this thread.

    Autograd and autocast, which depend on the tensors, are not asked.
    """
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def wants_plain_pytorch() -> bool:
    """Return whether operations of PyTorch must stand in for a kernel.

    ONNX knows no kernel of ours. The transforms of ``torch.func`` and forward-mode derivatives go operation by
    operation; those of an operator with a backward pass alone would be refused, or silently 0.
    """
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
