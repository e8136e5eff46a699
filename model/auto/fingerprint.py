"""A network told from others by all that decides how fast it runs: structure, code, shapes and dtypes, not values."""

import hashlib
import inspect
import json
import re
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..early_exit_network import EarlyExitNetwork
from ..exit_rule import ExitRule

#: What every module has: switches, and dictionaries of what is told by itself.
_OWN = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}


def network_fingerprint(network: EarlyExitNetwork) -> str | None:
    """Return a hash of the taps, of every layer's class, source and attributes, and of the form of all tensors.

    Rules are left out: they may change while a runner runs.

    Returns:
        str: or None where the source of a layer's class cannot be read, as that of a notebook, so that nothing tells
        whether its forward is still the same.
    """
    facts: list[Any] = [list(network.taps)]
    for name, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, ExitRule):
            continue
        source = _source_of(type(module))
        if source is None or isinstance(module, torch.jit.ScriptModule):
            return None
        attributes = {key: _told(value) for key, value in sorted(vars(module).items()) if key not in _OWN}
        facts.append([name, type(module).__qualname__, source, attributes])
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        facts.append([name, _told(tensor)])
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _source_of(kind: type) -> str | None:
    """Return the module that a class is defined in with a hash of its source; PyTorch's is told by its version."""
    module = kind.__module__
    if module.partition(".")[0] == "torch":
        return module
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return None
    return f"{module} {hashlib.sha256(source.encode()).hexdigest()}"


def _told(value: Any) -> Any:
    """Return something of a value that JSON can hold, the same in every process."""
    if isinstance(value, Tensor):
        return [list(value.shape), str(value.dtype), list(value.stride())]
    if isinstance(value, dict):
        # Hooks have numbers, which are counted through a process.
        return [_told(item) if isinstance(key, int) else [str(key), _told(item)] for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_told(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
