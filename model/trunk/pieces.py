"""``pieces_of``: what is compiled, cut so that repeated layers are compiled once, and nothing takes long.

In: the nodes between the taps of a traced backbone. Out: pieces of them, in order.
"""

from collections.abc import Collection, Hashable, Sequence
from itertools import chain

from torch import fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ...kernels import attend
from .fused_convolution import FusedConvolution
from .fused_linear import FusedLinear
from .layer_graph import runs_users_code
from .self_attention import SelfAttention, WindowAttention

#: Layers and functions of a piece at most, Swin's attention within windows being as many as 20 others. Of 100 a worker
#: compiles DenseNet's longest for 8 s (H200's host).
_MOST_OF_A_PIECE = 60
_WEIGHTS: dict[type, int] = {WindowAttention: 20}
#: Nodes looked at in search of what is alike: a second, of 1,500 nodes in 80 kinds of blocks some.
_MOST_LOOKS = 500_000
#: What compiling a piece takes by itself, in layers.
_OF_ITS_OWN = 4
#: Functions that Inductor leaves to other libraries.
_PRODUCTS = {F.linear, F.scaled_dot_product_attention, attend}

Piece = list[fx.Node]


def pieces_of(module: fx.GraphModule, parts: Sequence[Piece]) -> list[Piece]:
    """Cut parts of a graph where that saves compiling, since pieces are alike, or makes two of a long one."""
    cut = _cut_where_alike(module, parts)
    return [piece for part in cut for piece in _cut_equally(part)]


def _cut_where_alike(module: fx.GraphModule, parts: Sequence[Piece]) -> list[Piece]:
    """Cut before layers of the kinds that leave the least to compile, if alike pieces are compiled once.

    Only before those that other libraries compute: what Inductor makes before them it cannot fuse with them, cut or
    not. The kinds are found one after another, each the best beside those before.
    """
    numbers: dict[Hashable, int] = {}  # by kind, for kinds are long
    kinds = {node: numbers.setdefault(_kind(module, node), len(numbers)) for part in parts for node in part}
    of_kind: dict[int, list[fx.Node]] = {}
    for part in parts:
        for node, begin in _begins(module, part).items():
            of_kind.setdefault(kinds[node], []).append(begin)
    of_kind = {kind: begins for kind, begins in of_kind.items() if len(begins) > 1}
    cut, least, looks = [*parts], _to_compile(parts, kinds), 0
    chosen: set[fx.Node] = set()
    while of_kind and (looks := looks + len(of_kind) * len(kinds)) <= _MOST_LOOKS:
        tried = {}
        for kind, begins in of_kind.items():
            pieces = [piece for part in parts for piece in _cut_before(part, chosen.union(begins))]
            tried[kind] = _to_compile(pieces, kinds), pieces
        best = min(tried, key=lambda kind: tried[kind][0])
        if tried[best][0] >= least:
            break
        least, cut = tried[best]
        chosen.update(of_kind.pop(best))
    return cut


def _kind(module: fx.GraphModule, node: fx.Node) -> Hashable:
    """Return what a node computes, but for the values of parameters, for rates of dropout and texts of assertions."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        if any(map(runs_users_code, layer.modules())):
            return id(layer)
        return repr(layer), tuple(each.shape for each in chain(layer.parameters(), layer.buffers()))
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        return getattr(getattr(module.get_submodule(owner), name), "shape", None)
    given = tree_leaves((node.args, node.kwargs))
    return node.target, repr([each for each in given if not isinstance(each, (fx.Node, float, str))])


def _begins(module: fx.GraphModule, part: Piece) -> dict[fx.Node, fx.Node]:
    """Return by each product of a part what is to be cut before: itself, or what is read from parameters for it."""
    begins, of_parameters, first = {}, set[fx.Node](), None
    for node in part:
        if node.op == "get_attr" or (node.all_input_nodes and of_parameters.issuperset(node.all_input_nodes)):
            of_parameters.add(node)
            first = first or node
            continue
        if _is_product(module, node):
            begins[node] = first or node
        first = None
    return begins


def _is_product(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op != "call_module":
        return node.target in _PRODUCTS
    layer = module.get_submodule(str(node.target))
    if isinstance(layer, FusedConvolution):  # but those of one position, as in a squeeze-and-excitation
        return layer.folds_norm or layer.is_depthwise
    return isinstance(layer, (nn.Linear, FusedLinear, SelfAttention, WindowAttention))


def _cut_before(part: Piece, nodes: Collection[fx.Node]) -> list[Piece]:
    cuts = [0, *(at for at, node in enumerate(part) if at and node in nodes), len(part)]
    return [part[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]


def _to_compile(pieces: Sequence[Piece], kinds: dict[fx.Node, int]) -> int:
    """Return what compiling pieces takes, each of those that are alike once, in layers."""
    weights = {}
    for piece in pieces:
        place = {node: at for at, node in enumerate(piece)}
        alike = tuple((kinds[node], *(place.get(each, -1) for each in node.all_input_nodes)) for node in piece)
        weights[alike] = _OF_ITS_OWN + sum(map(_weight, piece))
    return sum(weights.values()) + len(pieces)


def _weight(node: fx.Node) -> int:
    if node.op != "call_module":
        return node.op != "get_attr"
    module = node.graph.owning_module
    assert module is not None
    return _WEIGHTS.get(type(module.get_submodule(str(node.target))), 1)


def _cut_equally(part: Piece) -> list[Piece]:
    """Cut what takes long to compile into about equal pieces, which are compiled side by side.

    A cut costs what is not fused across it: it is made where the fewest values cross, near to where they are equal.
    """
    place, weight = {node: at for at, node in enumerate(part)}, 0
    weights = [weight := weight + _weight(node) for node in part]
    count = -(-weight // _MOST_OF_A_PIECE)
    last = [max((place.get(user, len(part)) for user in node.users), default=at) for node, at in place.items()]
    cuts = [0]
    for number in range(1, count):
        wanted, reach = weight * number / count, weight / count / 4
        near = [(abs(so_far - wanted), at + 1) for at, so_far in enumerate(weights) if abs(so_far - wanted) <= reach]
        crossing = [(sum(at >= cut for at in last[:cut]), *each) for each in near if (cut := each[1])]
        cuts.append(min(crossing, default=(cuts[-1],))[-1])
    return [piece for begin, end in zip(cuts, [*cuts[1:], len(part)], strict=True) if (piece := part[begin:end])]
