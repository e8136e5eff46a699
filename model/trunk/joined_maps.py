"""Concatenations of maps without copies: the convolutions that make their parts write these where they belong."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from ...kernels.convolution import out_size
from ...kernels.fused_head import wants_plain_pytorch
from .fused_convolution import FusedConvolution, copied_to
from .in_place import may_be_changed
from .layer_graph import LayerGraph, is_users

_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
#: Concatenations of the same parts, the longest first: the others have the first ones alone, as DenseNet's.
_Chain = list[Node]


def join_maps(module: fx.GraphModule, x: Tensor) -> int:
    """Let convolutions in Triton write into the maps that they are concatenated to; returns how many are no copies now.

    Where that saves launches: parts that others make are copied, and so is what others read than such convolutions.
    Nothing is joined that may be changed in place: a concatenation would be in the memory of its parts.

    Args:
        module: whose convolutions have chosen how they run; it is rewritten.
        x: an example batch, which shows channels, dtypes and where maps lie.
    """
    layers, seen = LayerGraph(module.graph, module, {}), _Seen(module)
    seen.run(x.clone(memory_format=torch.preserve_format))
    changed = may_be_changed(layers)
    count, used = 0, set[Node]()
    for chain in _chains(module.graph):
        parts = _parts(chain[0])  # of which some may be concatenations that are joined by now
        if (
            used.isdisjoint(parts)
            and changed.isdisjoint([*chain, *parts])
            and _saves_launches(layers, chain, seen.values)
        ):
            _join(layers, chain, seen.values)
            used.update(parts)
            count += len(chain)
    if count:
        module.graph.lint()
        module.recompile()
    return count


class _Seen(fx.Interpreter):
    """Runs a module, and keeps what each of its nodes made, without its numbers."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n] = value.to("meta") if isinstance(value, Tensor) else None
        return value


def _parts(node: Node) -> tuple[Node, ...]:
    """Return what a node concatenates by channels, or nothing if it does not, or some of it twice."""
    if node.op != "call_function" or node.target not in _CONCATENATIONS:
        return ()
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | dict(node.kwargs)
    parts: Any = given.get("tensors")
    if given.keys() != {"tensors", "dim"} or given["dim"] not in (1, -3) or not isinstance(parts, (list, tuple)):
        return ()
    return tuple(parts) if len({*parts}) == len(parts) and all(isinstance(part, Node) for part in parts) else ()


def _chains(graph: fx.Graph) -> list[_Chain]:
    """Return the concatenations of channels, those that begin alike together."""
    parts_of = {node: parts for node in graph.nodes if (parts := _parts(node))}
    chains: list[_Chain] = []
    for node, parts in sorted(parts_of.items(), key=lambda item: -len(item[1])):
        longer = next((chain for chain in chains if parts_of[chain[0]][: len(parts)] == parts), None)
        if longer is not None:
            longer.append(node)
        else:
            chains.append([node])
    return chains


def _writer(layers: LayerGraph, node: Node) -> FusedConvolution | None:
    """Return the convolution in Triton that a node calls, if it does."""
    layer = layers.plain(node) if node.op == "call_module" else None
    return layer if isinstance(layer, FusedConvolution) and layer.in_triton and layer.padded is None else None


def _others(layers: LayerGraph, chain: _Chain, node: Node) -> list[Node]:
    """Return who uses a map that lies in a wider one, but for a chain's concatenations and convolutions in Triton."""
    users = [user for user in node.users if user not in chain]
    return [
        user for user in users if _writer(layers, user) is None or user.args[0] is not node or node in user.args[1:]
    ]


def _saves_launches(layers: LayerGraph, chain: _Chain, seen: dict[Node, Any]) -> bool:
    """Return whether all are maps of one kind in channels_last, and fewer copies are made than there were.

    A copy is made as soon as a part is there: between it and the concatenation no code of the user's may run, which
    might change it by a name of its own.
    """
    parts, whole = _parts(chain[0]), seen[chain[0]]
    maps = [seen[each] for each in (*parts, chain[0])]
    if not all(isinstance(each, Tensor) and each.ndim == 4 and each.dtype == whole.dtype for each in maps):
        return False
    if not whole.is_contiguous(memory_format=torch.channels_last):
        return False
    copied = [part for part in parts if _writer(layers, part) is None]
    order = {node: at for at, node in enumerate(layers.graph.nodes)}
    last = max(map(order.__getitem__, chain))
    if any(is_users(layers, node) for part in copied for node, at in order.items() if order[part] < at < last):
        return False
    wide = [node for node in (*parts, *chain) if node not in copied and seen[node].shape != whole.shape]
    return len(copied) + sum(bool(_others(layers, chain, node)) for node in wide) < len(chain) and copied != [*parts]


def _join(layers: LayerGraph, chain: _Chain, seen: dict[Node, Any]) -> None:
    """Rewrite concatenations: memory for all, parts that are written or copied into it, and views of that."""
    graph, order = layers.graph, {node: at for at, node in enumerate(layers.graph.nodes)}
    parts = _parts(chain[0])
    channels = [seen[part].shape[1] for part in parts]
    ends = [*accumulate(channels)]
    first = min(parts, key=order.__getitem__)
    conv = _writer(layers, first)
    made_of: tuple[Any, ...] = first, ends[-1], (1, 1), ((1, 1), (0, 0), (1, 1))
    if conv is not None:
        sizes = conv.stride, conv.padding, conv.dilation
        made_of = first.args[0], ends[-1], (*conv.weight.shape[2:],), sizes
    with graph.inserting_after(first) if conv is None else graph.inserting_before(first):
        memory = graph.call_function(joined_memory, made_of)
    written: list[Node] = []
    for part, end, count in zip(parts, ends, channels, strict=True):
        is_writer = _writer(layers, part) is not None
        with graph.inserting_after(memory if is_writer or part is first else part):
            place = graph.call_function(place_in, (memory, end - count, count))
        if is_writer:
            part.kwargs = {"into": place}
            _copy_for(layers, _others(layers, chain, part), part, seen)
            written.append(part)
            continue
        with graph.inserting_after(place):
            written.append(graph.call_function(written_to, (place, part)))
    for node in chain:
        count = len(_parts(node))
        others = _others(layers, chain, node) if count < len(parts) else []
        with graph.inserting_before(node):
            view = graph.call_function(joined, (memory, ends[count - 1], *written[:count]))
        seen[view] = seen[node]
        layers.replace(node, view)
        _copy_for(layers, others, view, seen)


def _copy_for(layers: LayerGraph, users: Sequence[Node], node: Node, seen: dict[Node, Any]) -> None:
    """Give some users of a map that lies in a wider one a copy in channels_last, as they would have it."""
    if users:
        with layers.graph.inserting_after(node):
            dense = layers.graph.call_method("contiguous", (node,), {"memory_format": torch.channels_last})
        seen[dense] = seen[node]
        for user in users:
            user.replace_input_with(node, dense)


def joined_memory(x: Tensor, channels: int, window: Sequence[int], sizes: Sequence[Sequence[int]]) -> Tensor | None:
    """Allocate a map of so many channels, of the size that a convolution of ``x`` makes.

    None where nothing is to be written in place: in what is exported, transformed or differentiated; or where autocast
    says of what dtype it is.
    """
    traces = torch.compiler.is_exporting() or wants_plain_pytorch()
    if traces or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return None
    shape = len(x), channels, *out_size(x.shape[2:], window, sizes)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def place_in(memory: Tensor | None, start: int, channels: int) -> Tensor | None:
    """Return where some channels belong, if there is memory for them."""
    return None if memory is None else memory.narrow(1, start, channels)


def written_to(place: Tensor | None, part: Tensor) -> Tensor:
    """Copy a part to its place, which is returned, if there is one."""
    return part if place is None else copied_to(place, part)


def joined(memory: Tensor | None, channels: int, *written: Tensor) -> Tensor:
    """Return the first channels of a map, once they are written."""
    if memory is None:
        return torch.cat(written, 1)
    return memory if channels == memory.shape[1] else memory.narrow(1, 0, channels)
