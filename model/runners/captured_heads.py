"""Detects heads that were changed since a runner was made, which would silently go on with the old ones."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from ..early_exit_network import EarlyExitNetwork
from ..fused_aux_head import FusedAuxHead
from ..hooks import hooks_of, users_hooks


class CapturedHeads:
    """The heads of a network as they were when a runner was made."""

    def __init__(self, network: EarlyExitNetwork) -> None:
        """Remember the heads, their rules and layers, what users put on them, and where the tensors of each lie."""
        # Looked up without nn.Module's attribute access, which would cost each request some microseconds a head.
        self._objects: list[tuple[str, Mapping[str, object], str, object]] = [
            ("network: its heads were replaced by other objects", network._modules, "heads", network.heads)
        ]
        self._addresses: list[tuple[str, Tensor, int]] = []
        self._kinds: list[tuple[str, nn.Module, type]] = []
        self._hooks: list[tuple[str, Mapping[int, Any], list[Any]]] = []
        for index, (tap, head) in enumerate(zip(network.taps, network.exit_heads, strict=True)):
            its, replaced = f"heads[{tap!r}]", "was replaced by another object"
            self._objects.append((f"{its} {replaced}", network.heads._modules, str(index), head))
            for name, layer in head.named_modules():
                what = f"{its}: its {name}" if name else its
                self._kinds.append((f"{what} was given another class", layer, type(layer)))
                self._hooks += [(f"{what} was given other hooks", one, users_hooks(one)) for one in hooks_of(layer)]
                own = vars(layer)
                self._objects.append((f"{what} was given another forward", own, "forward", own.get("forward")))
                for holder in (layer._modules, layer._parameters, layer._buffers):
                    for name, captured in holder.items():
                        self._objects.append((f"{its}: its {name} {replaced}", holder, name, captured))
                        if isinstance(captured, Tensor):
                            what = f"{its}: its {name.removesuffix('_tensor')}"
                            self._addresses.append((what, captured, captured.data_ptr()))
            changing: list[tuple[str, nn.Module, str]] = [("rule's", head.rule, "criterion")]
            if isinstance(head, FusedAuxHead) and (hidden := head.hidden) is not None:
                changing += [("hidden layers'", hidden, name) for name in ("rectifies", "activation")]
                changing += [] if hidden.norm is None else [("norm's", hidden.norm, "eps")]
            for whose, owner, name in changing:
                self._objects.append((f"{its}: its {whose} {name} was changed", vars(owner), name, vars(owner)[name]))

    def check_unchanged(self) -> None:
        """Raise a ``RuntimeError`` that names what was replaced or moved.

        Some hundred lookups, in memory that no cache holds after a wait: best done while the device works.
        """
        for changed, holder, name, captured in self._objects:
            if holder.get(name) is not captured:  # pruned or parametrized, a layer has no such parameter
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
