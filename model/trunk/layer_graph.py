"""``LayerGraph``: a traced graph with the layers that it calls, while it is rewritten."""

from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.fx import Node

from ..hooks import why_not_plain
from .tap_tracer import tap_mark


class LayerGraph:
    """A graph together with the layers that its nodes call."""

    def __init__(self, graph: fx.Graph, root: nn.Module, source_of: Mapping[nn.Module, nn.Module]) -> None:
        """Take a graph of ``root``; ``source_of`` holds the user's own layer for each of its layers."""
        self.graph = graph
        self.root = root
        self.new: dict[str, nn.Module] = {}
        self._source_of = source_of

    def layer(self, node: Any) -> nn.Module | None:
        """Return the layer that a node calls with one or two arguments, unless it has hooks or a forward of its own."""
        if not isinstance(node, Node) or node.op != "call_module" or node.kwargs or len(node.args) not in (1, 2):
            return None
        layer = self.called(node)
        return layer if why_not_plain(layer) is None else None

    def called(self, node: Node) -> nn.Module:
        """Return the layer that a ``call_module`` node calls, hooks or not."""
        return self.new.get(str(node.target)) or self.root.get_submodule(str(node.target))

    def source(self, layer: nn.Module) -> nn.Module:
        """Return the user's own layer that a layer of ours is a copy of."""
        return self._source_of[layer]

    def add(self, name: str, layer: nn.Module) -> str:
        """Give a new layer a name that no other has."""
        taken = set(dict(self.root.named_modules())) | set(dict(self.root.named_parameters())) | set(self.new)
        base = name = name.replace(".", "_")
        count = 1
        while name in taken or hasattr(self.root, name):
            count += 1
            name = f"{base}_{count}"
        self.new[name] = layer
        return name

    def insert(self, before: Node, name: str, *args: Node) -> Node:
        """Call a new layer before a node."""
        with self.graph.inserting_before(before):
            return self.graph.call_module(name, args)

    def replace(self, last: Node, by: Node, *others: Node) -> None:
        """Let ``by`` take the place of ``last``, and drop it and others, each a user of the next."""
        last.replace_all_uses_with(by)
        for node in (last, *others):
            self.graph.erase_node(node)

    def assemble(self) -> fx.GraphModule:
        """Make a module of the graph; at each tap it calls an Identity of the tap's name, for hooks to listen at."""
        layers: dict[str, Any] = {}
        taps = {str(node.args[1]) for node in self.graph.nodes if node.target is tap_mark}
        for node in list(self.graph.nodes):
            if node.target is tap_mark:
                value, tap = node.args
                with self.graph.inserting_before(node):
                    self.replace(node, self.graph.call_module(tap, (value,)))
                layers[tap] = nn.Identity()
            elif node.op == "call_module":
                layer = self.called(node)
                if node.target in taps:
                    node.target = self.add(f"{node.target}_tapped", layer)
                layers[node.target] = layer
            elif node.op == "get_attr":
                owner, _, name = node.target.rpartition(".")
                layers[node.target] = getattr(self.root.get_submodule(owner), name)
        return fx.GraphModule(layers, self.graph, type(self.root).__name__)


def only_user(node: Any) -> Node | None:
    """Return the one node that uses another, if it does so once."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return user if _uses(user, node) == 1 else None


def _uses(user: Node, node: Node) -> int:
    """Count how often a node is an argument of its user: ``x + x`` uses x twice."""
    count = 0

    def look(each: Node) -> Node:
        nonlocal count
        count += each is node
        return each

    fx.map_arg((user.args, user.kwargs), look)
    return count
