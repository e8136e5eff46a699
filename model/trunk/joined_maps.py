"""Concatenations of maps without copies: the convolutions that make their parts write these where they belong."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import Node

from ...kernels.convolution import out_size
from .fused_convolution import FusedConvolution, takes_no_memory
from .in_place import may_be_changed
from .layer_graph import LayerGraph

_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


class _Chain(NamedTuple):
    """Concatenations of the same parts, of which some have the first ones alone, as DenseNet's."""

    nodes: list[Node]
    parts: Sequence[Node]
    """Those of the longest one."""


def join_maps(module: fx.GraphModule, x: Tensor) -> int:
    """Let convolutions in Triton write into the maps that they are concatenated to; returns how many are no copies now.

    Where that saves launches: parts that others make are copied, as are views that others read than such convolutions.
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
        if used.isdisjoint(chain.parts) and changed.isdisjoint([*chain.nodes, *chain.parts]):
            if _saves_launches(layers, chain, seen.values):
                _join(layers, chain, [seen.values[part].shape[1] for part in chain.parts])
                used.update(chain.parts)
                count += len(chain.nodes)
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


def _chains(graph: fx.Graph) -> list[_Chain]:
    """Return the concatenations of several channels each, the longest first of those that begin alike."""
    parts_of: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _CONCATENATIONS:
            given = dict(zip(("tensors", "dim"), node.args, strict=False)) | dict(node.kwargs)
            parts = given.get("tensors", ())
            if given.keys() == {"tensors", "dim"} and given["dim"] in (1, -3) and len({*parts}) == len(parts):
                parts_of[node] = tuple(parts)
    chains: list[_Chain] = []
    for node, parts in sorted(parts_of.items(), key=lambda item: -len(item[1])):
        longer = next((chain for chain in chains if chain.parts[: len(parts)] == parts), None)
        if longer is not None:
            longer.nodes.append(node)
        else:
            chains.append(_Chain([node], parts))
    return chains


def _writer(layers: LayerGraph, node: Node) -> FusedConvolution | None:
    """Return the convolution in Triton that a node calls, if it does."""
    layer = layers.plain(node) if node.op == "call_module" else None
    return layer if isinstance(layer, FusedConvolution) and layer.in_triton and layer.padded is None else None


def _saves_launches(layers: LayerGraph, chain: _Chain, seen: dict[Node, Any]) -> bool:
    """Return whether all are maps of one kind in channels_last, and fewer copies are made than there were."""
    whole = seen[chain.nodes[0]]
    maps = [seen[each] for each in (*chain.parts, chain.nodes[0])]
    if not all(isinstance(each, Tensor) and each.ndim == 4 and each.dtype == whole.dtype for each in maps):
        return False
    if not whole.is_contiguous(memory_format=torch.channels_last):
        return False
    copied = sum(_writer(layers, part) is None for part in chain.parts)
    in_rows = [*(node for node in chain.nodes if seen[node].shape != whole.shape), *chain.parts]
    for node in in_rows:
        others = [user for user in node.users if user not in chain.nodes]
        copied += any(_writer(layers, user) is None or user.args[0] is not node for user in others)
    return copied < len(chain.nodes) and any(_writer(layers, part) for part in chain.parts)


def _join(layers: LayerGraph, chain: _Chain, channels: Sequence[int]) -> None:
    """Rewrite concatenations: memory for all, parts that are written or copied into it, and views of that."""
    graph, order = layers.graph, {node: at for at, node in enumerate(layers.graph.nodes)}
    first = min(chain.parts, key=order.__getitem__)
    ends = [*accumulate(channels)]
    conv = _writer(layers, first)
    made_of: tuple[Any, ...] = first, ends[-1], (1, 1), ((1, 1), (0, 0), (1, 1))
    if conv is not None:
        sizes = conv.stride, conv.padding, conv.dilation
        made_of = first.args[0], ends[-1], (*conv.weight.shape[2:],), sizes
    with graph.inserting_after(first) if conv is None else graph.inserting_before(first):
        memory = graph.call_function(joined_memory, made_of)
    written: list[Node] = []
    for part, end, count in zip(chain.parts, ends, channels, strict=True):
        is_writer = _writer(layers, part) is not None
        with graph.inserting_after(memory if is_writer or part is first else part):
            place = graph.call_method("narrow", (memory, 1, end - count, count))
        if is_writer:
            part.kwargs = {"into": place}
            written.append(part)
            continue
        with graph.inserting_after(place):
            written.append(graph.call_function(written_to, (place, part)))
    for node in chain.nodes:
        count = len(_parts(node))
        with graph.inserting_before(node):
            view = graph.call_function(joined, (memory, ends[count - 1], *written[:count]))
        layers.replace(node, view)


def _parts(node: Node) -> Sequence[Node]:
    return node.args[0] if node.args else node.kwargs["tensors"]  # type: ignore[return-value]


def joined_memory(x: Tensor, channels: int, window: Sequence[int], sizes: Sequence[Sequence[int]]) -> Tensor:
    """Allocate a map of so many channels, of the size that a convolution makes of ``x``."""
    shape = len(x), channels, *out_size(x.shape[2:], window, sizes)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def written_to(place: Tensor, part: Tensor) -> Tensor:
    """Copy a part to its place, which is returned, unless :func:`takes_no_memory`."""
    return part if takes_no_memory() else place.copy_(part)


def joined(memory: Tensor, channels: int, *written: Tensor) -> Tensor:
    """Return the first channels of a map, once they are written."""
    if takes_no_memory():
        return torch.cat(written, 1)
    return memory if channels == memory.shape[1] else memory.narrow(1, 0, channels)
