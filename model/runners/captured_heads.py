"""Detects heads replaced or moved in memory since a capture, whose graphs would silently read the old tensors."""

from collections.abc import Mapping

from torch import Tensor, nn

from ..early_exit_network import EarlyExitNetwork
from ..fused_aux_head import FusedAuxHead


class CapturedHeads:
    """The heads of a network as they were captured."""

    def __init__(self, network: EarlyExitNetwork) -> None:
        """Remember the heads, their rules and layers, and where the tensors lie that the graphs read of each."""
        # Looked up without nn.Module's attribute access, which would cost each request some microseconds a head.
        self._objects: list[tuple[str, Mapping[str, object], str, object]] = [
            ("network: its heads were replaced by other objects", network._modules, "heads", network.heads)
        ]
        self._addresses: list[tuple[str, Tensor, int]] = []
        for index, (tap, head) in enumerate(zip(network.taps, network.exit_heads, strict=True)):
            its, replaced = f"heads[{tap!r}]", "was replaced by another object"
            self._objects.append((f"{its} {replaced}", network.heads._modules, str(index), head))
            for layer in head.modules():
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
        for replaced, holder, name, captured in self._objects:
            if holder.get(name) is not captured:  # pruned or parametrized, a layer has no such parameter
                raise RuntimeError(
                    f"{replaced} since the capture; assign to the rule's attributes and copy into parameters, "
                    "or make a new runner"
                )
        for what, tensor, address in self._addresses:
            if tensor.data_ptr() != address:
                raise RuntimeError(
                    f"{what} was given other memory since the capture, by to() or an assignment to its data; copy into "
                    "parameters, or make a new runner"
                )
