"""All of a module that a call which fails must leave as it was."""

from typing import Any

import torch
from auxhead.model import ExitRule
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def _of_tensor(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    gradient = None if tensor.grad is None else tensor.grad.tolist()
    values = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()
    return id(tensor), tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.requires_grad, gradient, values


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Return parts, modes, hooks, rules, parameters, buffers and gradients of a module, by the names of its parts."""
    found = {"learned from": id(getattr(module, "learned_from", None))}
    for name, part in module.named_modules(remove_duplicate=False):
        tensors = {key: _of_tensor(tensor) for key, tensor in (*part._parameters.items(), *part._buffers.items())}
        hooks = [list(getattr(part, kind).items()) for kind in _HOOKS]
        rule = repr(part) if isinstance(part, ExitRule) else None
        found[name] = (id(part), part.training, hooks, rule, tensors)
    return found


def random_numbers() -> list[Any]:
    """Return the state of the random numbers of PyTorch, Python and NumPy."""
    import random

    import numpy as np

    name, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), *rest]
