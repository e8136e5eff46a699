"""``CapturedReads``: memory that a captured forward reads and has not made, kept for as long as its graphs."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CapturedReads(TorchDispatchMode):
    """Notes while a capture runs which memory its operators are given that none of them has allocated.

    A graph holds addresses and no references. Parameters stay, as a rule; a mask that a layer keeps for the last size
    it was called with goes at the next call with another one.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled layers run compiled."""
        return True

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Begin with all tensors that modules and their layers hold: kernels may get them by ways of their own."""
        super().__init__()
        self._read: dict[int, object] = {}  # storages, by their addresses
        self._made: set[int] = set()
        for module in modules:
            for layer in module.modules():
                self._keep(vars(layer))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        self._keep((args, kwargs))
        outputs = func(*args, **kwargs or {})
        for value in tree_leaves(outputs):
            if isinstance(value, Tensor) and (address := _storage(value)._cdata) not in self._read:
                self._made.add(address)
        return outputs

    def _keep(self, read: Any) -> None:
        for value in tree_leaves(read):
            if isinstance(value, Tensor):
                storage = _storage(value)
                if storage._cdata not in self._made or value.is_cpu:  # copies from the host are read at every launch
                    self._read[storage._cdata] = storage


def _storage(value: Tensor) -> Any:
    """Return the storage of a tensor, or one that has none (sparse, say) itself; both have a ``_cdata``."""
    try:
        return value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return value
