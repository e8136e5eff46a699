"""``CapturedReads``: memory that a captured forward reads and has not made, kept for as long as its graphs."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

#: Storages by their addresses, each with the address of its memory.
Addresses = dict[int, tuple[UntypedStorage, int]]


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
        self._read: dict[int, Any] = {}  # storages, by their addresses
        self._made: dict[int, StorageWeakRef] = {}  # which keep the addresses from others
        self._parameters: set[int] = set()
        for module in modules:
            for layer in module.modules():
                self._keep(vars(layer))
                self._parameters |= {storage._cdata for storage, _ in _storages((layer._parameters, layer._buffers))}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        self._keep((args, kwargs))
        outputs = func(*args, **kwargs or {})
        for storage, _ in _storages(outputs):
            if storage._cdata not in self._read and isinstance(storage, UntypedStorage):
                self._made[storage._cdata] = StorageWeakRef(storage)
        return outputs

    def _keep(self, read: Any) -> None:
        for storage, is_cpu in _storages(read):
            if storage._cdata not in self._made or is_cpu:  # copies from the host are read at every launch
                self._read[storage._cdata] = storage

    def resizable(self, static: Tensor) -> Addresses:
        """Return what was read that is no parameter or buffer, and not the static input: a layer may resize it."""
        others = {*self._parameters, static.untyped_storage()._cdata}
        return {
            key: (storage, storage.data_ptr())
            for key, storage in self._read.items()
            if key not in others and isinstance(storage, UntypedStorage)
        }


def check_unmoved(addresses: Addresses) -> None:
    """Raise a ``RuntimeError`` if memory was resized, by ``resize_`` or as an operator's ``out``, and so given back."""
    for storage, address in addresses.values():
        if storage.data_ptr() != address:
            raise RuntimeError(
                "network: a tensor that a layer keeps was resized in place since the capture, and is in other memory; "
                "make a new runner"
            )


def _storages(tree: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the storages of all tensors, and those in tensors of other classes, each with whether it is on the CPU.

    A tensor that has none (sparse, say) stands for itself; both have a ``_cdata``.
    """
    for value in tree_leaves(tree):
        if is_traceable_wrapper_subclass(value):
            yield from _storages([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, Tensor):
            try:
                yield value.untyped_storage(), value.is_cpu
            except (NotImplementedError, RuntimeError):
                yield value, value.is_cpu
