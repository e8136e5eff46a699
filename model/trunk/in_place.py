"""In-place changes of a traced backbone: which nodes make them, and what may not be moved past them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ...kernels import max_pool2d
from .fused_convolution import FusedConvolution
from .fused_linear import FusedLinear
from .layer_graph import LayerGraph, is_known, only_user, runs_users_code, tap_mark


def undisturbed(layers: LayerGraph, first: Node, last: Node, passed: set[Node]) -> bool:
    """Return whether what ``first`` reads is still the same when ``last`` runs, so that it may be computed there.

    Only ``passed`` and what works on its own fresh tensors may come between if it changes something in place.
    """
    node = first.next
    while node is not last:
        if node.op == "root" or (node not in passed and _changes_others(layers, node)):
            return False
        node = node.next
    return True


def changed_in_place(layers: LayerGraph) -> str | None:
    """Name the first node that may change in place what others may read at the same time, or return None."""
    return next((node.name for node in layers.graph.nodes if _changes_others(layers, node)), None)


def _changes_others(layers: LayerGraph, node: Node) -> bool:
    """Return whether a node may change in place what it did not get for itself alone."""
    return any(only_user(each) is None or not _makes_one(layers, each) for each in _changes(layers, node))


def _changes(layers: LayerGraph, node: Node) -> Sequence[Any]:
    """Return what a node may change in place: all that it reads, if it is the user's, a hook or a forward too."""
    first = node.args[:1] or node.all_input_nodes
    if node.op == "call_module":
        within = [*layers.called(node).modules()]
        known = all(type(layer).__module__.startswith(("torch.nn.", f"{__package__}.")) for layer in within)
        if not known or any(map(runs_users_code, within)):
            return node.all_input_nodes
        return first if any(getattr(layer, "inplace", False) for layer in within) else ()
    if node.op not in ("call_function", "call_method") or node.target is tap_mark:
        return ()
    if "out" in node.kwargs or (node.op == "call_function" and not is_known(node.target)):
        return node.all_input_nodes
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        return _written_by_operator(node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return first if node.kwargs.get("inplace") or _names_in_place(name) else ()


def _written_by_operator(node: Node) -> list[Any]:
    """Return what an operator writes to, by its schema: of several of one name what any of them does."""
    target: Any = node.target
    overloads = [target] if isinstance(target, OpOverload) else [getattr(target, name) for name in target.overloads()]
    written = []
    for overload in overloads:
        for place, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
                written += [each for each in tree_leaves(given) if isinstance(each, Node)]
    return written


def may_be_changed(layers: LayerGraph) -> set[Node]:
    """Return the nodes whose values may share memory with what a node may change in place."""
    shared: dict[Node, set[Node]] = {}
    for node in layers.graph.nodes:
        group = {node}.union(*([] if _makes_one(layers, node) else [shared[each] for each in node.all_input_nodes]))
        shared.update(dict.fromkeys(group, group))
    changed = [each for node in layers.graph.nodes for each in tree_leaves(_changes(layers, node))]
    return set().union(*(shared[each] for each in changed if isinstance(each, Node)))


#: What shares its input's memory, or copies it where it lies otherwise; and what shares it in any layout.
_MAY_COPY = {
    "bfloat16", "contiguous", "double", "flatten", "float", "half", "ravel", "reshape", "reshape_as", "to", "type",
    "type_as",
}  # fmt: skip
_SHARES = {
    "broadcast_to", "chunk", "data", "detach", "diagonal", "dsplit", "expand", "expand_as", "getitem", "hsplit", "mT",
    "moveaxis", "movedim", "narrow", "permute", "positive", "select", "split", "squeeze", "swapaxes", "swapdims", "T",
    "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "vsplit",
}  # fmt: skip


def changed_in_some_layouts(layers: LayerGraph) -> str | None:
    """Name the first node that changes in place what others read only where maps lie in one way, or return None.

    What the user's layers and functions do nobody knows: of them it is not supposed, since few change what they read.
    """
    order = {node: at for at, node in enumerate(layers.graph.nodes)}

    def is_read_after(made: Node, change: Node) -> bool:
        """Return whether a value, or what may share its memory, is read behind a change."""
        readers = [user for user in made.users if not _reads_sizes(user)]
        shares = [user for user in readers if _operation(layers, user) in _MAY_COPY | _SHARES]
        return any(order[user] > order[change] for user in readers) or any(
            is_read_after(each, change) for each in shares
        )

    for node in layers.graph.nodes:
        users = node.op == "call_function" and not is_known(node.target)
        users |= node.op == "call_module" and not type(layers.called(node)).__module__.startswith("torch.nn.")
        for changed in () if users else _changes(layers, node):
            may_copy, passed = False, {node}
            while isinstance(changed, Node):
                if may_copy and sum(not _reads_sizes(user) for user in changed.users) > 1:
                    return str(node.name)
                passed.add(changed)
                before = [user for user in changed.users if user not in passed and order[user] < order[node]]
                beside = [user for user in before if _operation(layers, user) in _MAY_COPY]
                if any(is_read_after(each, node) for each in beside):
                    return str(node.name)
                name = _operation(layers, changed)
                if name not in _MAY_COPY | _SHARES or not changed.args:
                    break
                may_copy |= name in _MAY_COPY
                changed = changed.args[0]
    return None


def _operation(layers: LayerGraph, node: Node) -> str:
    """Return what a node computes by the name of the method of tensors that does so; of an attribute its name."""
    if node.op == "call_module":
        return "flatten" if type(layers.layer(node)) is nn.Flatten else ""
    name = node.args[1] if node.target is getattr else node.target
    return name if isinstance(name, str) else getattr(name, "__name__", "").partition(".")[0]


def _reads_sizes(node: Node) -> bool:
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1] in ("shape", "ndim", "dtype"))


def _names_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name.strip("_") in fx.graph.inplace_methods


def _makes_one(layers: LayerGraph, node: Node) -> bool:
    """Return whether a node makes a tensor of its own."""
    kinds = FusedConvolution, FusedLinear, nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.MaxPool2d, nn.AvgPool2d
    return type(layers.layer(node)) in kinds or node.target in (torch.cat, max_pool2d)
