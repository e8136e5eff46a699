"""``kept``: puts back what forwards of a model change: modes, parameters, buffers, attributes, random generators."""

import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ..basics.arguments import is_plain
from .recording import OperatorMode, has_memory, written_tensors
from .shallow_copy import OF_EVERY_MODULE

_MISSING = object()


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Put each layer of a module, at the end, into the mode that it had; some ``train`` methods do more, or less."""
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
    finally:
        for layer, training in modes:
            layer.training = training


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Give the buffers of a module, at the end, the numbers that they had: some forwards count in them."""
    found = [each for each in {*module.buffers()} if not is_lazy(each) and is_plain(each) and not each.is_meta]
    before = [(each, each.detach().clone()) for each in found]
    try:
        yield
    finally:
        for buffer, numbers in before:
            put_back(buffer, numbers)


def put_back(tensor: Tensor, before: Tensor) -> None:
    """Give a tensor its numbers of before."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if not torch.equal(tensor.nan_to_num(), before.nan_to_num()):  # else another thread may be reading it
            tensor.copy_(before)


@contextmanager
def kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back what forwards of a model change: parameters, buffers, plain attributes, the states of generators."""
    with ExitStack() as stack:
        stack.enter_context(_KeptParameters(model))
        # a lazy layer becomes another at its first call
        ours = (each for each in model.modules() if not isinstance(each, (torch.jit.ScriptModule, LazyModuleMixin)))
        for module in ours:
            own = [each for key, each in vars(module).items() if key not in OF_EVERY_MODULE and type(each) is dict]
            for held in (vars(module), module._buffers, *own):
                stack.callback(_put_back_items, held, dict(held))
            for values in (each for each in vars(module).values() if type(each) is list):
                stack.callback(values.__setitem__, slice(None), list(values))
        stack.enter_context(modes_kept(model))
        stack.enter_context(buffers_kept(model))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else [], device_type="cuda"))
        python, numpy = generators()
        stack.callback(random.setstate, python)
        if numpy is not None:
            stack.callback(sys.modules["numpy"].random.set_state, numpy)
        yield


class _KeptParameters(OperatorMode):
    """Copies parameters before an operator writes to them, and puts them back at the end."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._held = [(each, each.detach()) for each in model.parameters() if has_memory(each)]
        self._by_memory: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for _, data in self._held:
            self._by_memory[data.untyped_storage()._cdata].append(data)
        self._before: dict[Tensor, Tensor] = {}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy what an operator writes to, and run it."""
        for tensor in written_tensors(func, args, kwargs or {}):
            for data in self._by_memory.get(tensor.untyped_storage()._cdata, ()):
                if data not in self._before:
                    self._before[data] = data.clone()
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        """Put them back."""
        super().__exit__(*error)
        for data, before in self._before.items():
            put_back(data, before)
        for parameter, data in self._held:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data


def generators() -> tuple[Any, Any]:
    """Return the states of Python's generator and NumPy's; None for a NumPy that is not there."""
    return random.getstate(), sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _put_back_items(held: dict[str, Any], before: dict[str, Any]) -> None:
    for key in [key for key, each in held.items() if before.get(key, _MISSING) is not each]:
        del held[key]
    for key in before.keys() - held.keys():
        held[key] = before[key]
