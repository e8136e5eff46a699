"""``CapturedNetwork``: heads and memory of a network as they were at a capture; changes, which no graph sees, raise."""

from collections.abc import Container, Mapping
from typing import Any, NoReturn

from torch import Tensor, UntypedStorage, nn

from ..listening.hooks import WAYS, hooks_of, users_hooks
from ..network.early_exit_network import EarlyExitNetwork

#: Storages by their addresses, each with the address of its memory.
Addresses = dict[int, tuple[UntypedStorage, int]]


class CapturedNetwork:
    """A network as it was when a runner was made: one object for all checks of what graphs or segments read."""

    def __init__(self, network: EarlyExitNetwork, *, rules: bool = True, read: Container[int] | None = None) -> None:
        """Remember the heads, their layers, what users put on them, and where the tensors of each lie.

        The backbone's linear layers that give class scores are looked at, too, as its classifier is one.

        Args:
            network: that was captured.
            rules: look at criteria as well, for who does not at each request.
            read: addresses of the parameters and buffers that graphs read, or that copies are made from; None: all.
        """
        self.resizable: Addresses = {}
        """Memory that was read and is no parameter; see :attr:`CapturedProgram.resizable`."""
        self._tensors = [
            (name, tensor, tensor.detach(), tensor.data_ptr())  # detached, it keeps the memory whatever is assigned
            for name, tensor in (*network.named_parameters(), *network.named_buffers())
            if read is None or tensor.data_ptr() in read
        ]
        # Looked up without nn.Module's attribute access, which would cost each request some microseconds a head.
        self._objects: list[tuple[str, Mapping[str, object], str, object]] = [
            ("network: its heads were replaced by other objects", network._modules, "heads", network.heads),
            ("network: its backbone was replaced by another object", network._modules, "backbone", network.backbone),
        ]
        self._values: list[tuple[str, Mapping[str, object], str, object]] = []
        self._addresses: list[tuple[str, Tensor, int]] = []
        self._kinds: list[tuple[str, nn.Module, type]] = []
        self._hooks: list[tuple[str, Mapping[int, Any], list[Any]]] = []
        replaced = "was replaced by another object"
        exits: list[tuple[str, nn.Module, str, nn.Module]] = [
            (f"heads[{tap!r}]", network.heads, str(index), head)
            for index, (tap, head) in enumerate(zip(network.taps, network.exit_heads, strict=True))
        ]
        for name, layer in network.backbone.named_modules():
            if isinstance(layer, nn.Linear) and layer.out_features == network.exit_heads[0].num_classes:
                parent, _, key = name.rpartition(".")
                exits.append((f"the backbone's {name!r}", network.backbone.get_submodule(parent), key, layer))
        for its, holder, key, head in exits:
            self._objects.append((f"{its} {replaced}", holder._modules, key, head))
            rule = getattr(head, "rule", None)
            passed = None if rules else rule
            for name, layer in head.named_modules():
                if layer is passed:
                    continue
                what = f"{its}: its {name}" if name else its
                self._kinds.append((f"{what} was given another class", layer, type(layer)))
                self._hooks += [(f"{what} was given other hooks", one, users_hooks(one)) for one in hooks_of(layer)]
                own = vars(layer)
                for way in WAYS if layer is head else ("forward",):
                    self._objects.append((f"{what} was given another {way}", own, way, own.get(way)))
                for holder in (layer._modules, layer._parameters, layer._buffers):
                    for name, captured in holder.items():
                        if captured is not passed or captured is None:
                            self._objects.append((f"{its}: its {name} {replaced}", holder, name, captured))
                        if isinstance(captured, Tensor):
                            what = f"{its}: its {name.removesuffix('_tensor')}"
                            self._addresses.append((what, captured, captured.data_ptr()))
            owners = [rule if rules else None, getattr(head, "hidden", None)]
            changing = [each for owner in owners if owner is not None for each in owner.depends_on()]
            changing += [(vars(head), name) for name in getattr(head, "options", ())]
            for of, name in changing:
                value = of.get(name)
                checked = self._objects if isinstance(value, (Tensor, nn.Module)) else self._values
                checked.append((f"{its}: its {name} was changed", of, name, value))

    def check_unchanged(self) -> None:
        """Raise a ``RuntimeError`` that names what was replaced or moved.

        Some hundred lookups, in memory that no cache holds after a wait: best done while the device works.
        """
        for changed, holder, name, captured in self._objects:
            if holder.get(name) is not captured:  # pruned or parametrized, a layer has no such parameter
                self._refuse(changed)
        for changed, holder, name, value in self._values:
            if holder.get(name) != value:
                self._refuse(changed)
        for changed, layer, kind in self._kinds:
            if type(layer) is not kind:
                self._refuse(changed)
        for changed, hooks, before in self._hooks:
            if (hooks or before) and users_hooks(hooks) != before:
                self._refuse(changed)
        for what, tensor, address in self._addresses:
            if tensor.data_ptr() != address:
                self._refuse(f"{what} was given other memory by to() or an assignment to its data")

    def _refuse(self, changed: str) -> NoReturn:
        raise RuntimeError(
            f"{changed} since the runner was made; assign to the rule's attributes and copy into parameters, or make a "
            "new runner"
        )

    def check_unmoved(self, network: EarlyExitNetwork) -> None:
        """Raise a ``RuntimeError`` that names a parameter or buffer that is another one now, or in other memory."""
        now = dict((*network.named_parameters(), *network.named_buffers()))
        for name, tensor, _kept, address in self._tensors:
            if now.get(name) is not tensor or tensor.data_ptr() != address:
                raise RuntimeError(
                    f"network: {name} was given other memory since the capture; copy into it, or make a new runner"
                )

    def check_not_resized(self) -> None:
        """Raise a ``RuntimeError`` if memory was resized, by ``resize_`` or as an ``out``, and so given back."""
        for storage, address in self.resizable.values():
            if storage.data_ptr() != address:
                raise RuntimeError(
                    "network: a tensor that a layer keeps was resized in place since the capture, and is in other "
                    "memory; make a new runner"
                )

    def clear(self) -> None:
        """Let the memory go."""
        self._tensors.clear()
        self.resizable.clear()
