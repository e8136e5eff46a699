"""Rewrites of a traced backbone: convolutions and linear layers fused, max-pools replaced, the classifier taken off."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from ...kernels import max_pool2d, runs_triton
from ..heads.fused_aux_head import FusedAuxHead
from .fused_convolution import PADDED_CHANNELS, FusedConvolution, scaling_by
from .fused_linear import FusedLinear, are_parameters
from .in_place import undisturbed
from .layer_graph import IN_PLACE, LayerGraph, only_user

RELU_FUNCTIONS = (F.relu, F.relu_, torch.relu, torch.relu_)
ADD_FUNCTIONS = (operator.add, IN_PLACE["iadd"], torch.add)
HALVES = (torch.float16, torch.bfloat16)
MAX_POOL_FUNCTIONS = (F.max_pool2d, torch.max_pool2d)


def drop_no_ops(layers: LayerGraph) -> None:
    """Take out Identity, Dropout where it does nothing, and assertions that a convolution makes maps."""
    for node in list(layers.graph.nodes):
        layer = layers.layer(node)
        does_nothing = (
            type(layer) is nn.Identity
            or (isinstance(layer, nn.Dropout) and type(layer) is nn.Dropout and not layer.training)
            or (node.target is F.dropout and node.kwargs.get("training") is False)
        )
        if does_nothing and isinstance(node.args[0], Node):
            layers.replace(node, node.args[0])
    for node in reversed(list(layers.graph.nodes)):
        asserts = node.target is torch._assert and _says_that_maps_are_maps(layers, node.args[0])
        if asserts or (not node.users and (node.target is operator.eq or _is_rank(node))):
            layers.graph.erase_node(node)


def _says_that_maps_are_maps(layers: LayerGraph, condition: Any) -> bool:
    """Return whether a node is ``y.ndim == 4`` for the output y of a convolution, as timm's batch norms assert."""
    if not isinstance(condition, Node) or condition.target is not operator.eq or condition.args[1] != 4:
        return False
    rank: Any = condition.args[0]
    return _is_rank(rank) and type(layers.layer(rank.args[0])) is nn.Conv2d


def _is_rank(node: Any) -> bool:
    return isinstance(node, Node) and node.target is getattr and node.args[1] == "ndim"


def replace_convolutions(layers: LayerGraph) -> list[str]:
    """Replace convolutions by :class:`FusedConvolution`; return why a batch norm behind one was not folded."""
    notes = []
    for node in list(layers.graph.nodes):
        conv = layers.layer(node)
        if type(conv) is not nn.Conv2d or conv.padding_mode != "zeros" or not isinstance(node.args[0], Node):
            continue
        user = only_user(node)
        norm = _norm(layers, user)
        last = node
        if norm is not None and user is not None:
            if norm.training or norm.running_mean is None or norm.running_var is None:
                why = "is in training mode" if norm.training else "has no running statistics"
                notes.append(f"The batch norm {user.target!r} is not folded: it {why}.")
            elif undisturbed(layers, node, user, {user}):
                last = user
        sources: list[Any] = [layers.source(layer) for layer in (conv, norm if last is user else None) if layer]
        name = layers.add(f"{node.target}_fused", FusedConvolution(*sources))
        layers.replace(last, layers.insert(last, name, node.args[0]), *([node] if last is not node else []))
    return notes


def replace_norms(layers: LayerGraph) -> None:
    """Replace batch norms that follow no convolution, as before activations, by :class:`FusedConvolution` as well."""
    for node in list(layers.graph.nodes):
        norm = _norm(layers, node)
        if norm is None or norm.training or norm.running_mean is None or norm.running_var is None:
            continue
        if runs_triton(norm.running_mean) and isinstance(node.args[0], Node):
            source: Any = layers.source(norm)
            name = layers.add(f"{node.target if node.op == 'call_module' else node.name}_fused", scaling_by(source))
            layers.replace(node, layers.insert(node, name, node.args[0]))


def fuse_what_follows(layers: LayerGraph) -> None:
    """Move activations and sums into the convolutions before them."""
    for node in list(layers.graph.nodes):
        if (following := _following(layers, node)) is not None:
            _fuse_following(layers, node, following)
    for node in list(layers.graph.nodes):
        _fuse_sum(layers, node)


def replace_linears(layers: LayerGraph) -> None:
    """Replace linear layers of half precision, and activations behind them, by :class:`FusedLinear`."""
    for node in list(layers.graph.nodes):
        linear, user = layers.layer(node), only_user(node)
        if type(linear) is not nn.Linear or len(node.args) != 1:
            continue
        weight, bias = (linear._parameters.get(name, ...) for name in ("weight", "bias"))
        if not are_parameters(weight, bias) or linear.weight.dtype not in HALVES:
            continue
        following = None if user is None else _following(layers, user)
        name = layers.add(f"{node.target}_fused", FusedLinear(linear.weight, linear.bias, following or ""))
        fused = layers.insert(node, name, *_nodes(node))
        layers.replace(*((node, fused) if following is None or user is None else (user, fused, node)))


def _norm(layers: LayerGraph, node: Node | None) -> nn.BatchNorm2d | None:
    """Return the batch norm that a node computes, as a module or, within one of timm's, as a function."""
    layer = layers.layer(node)
    if type(layer) is nn.BatchNorm2d:
        return layer
    if node is None or node.target is not F.batch_norm or len(node.args) != 3:
        return None
    given = dict(zip(("running_mean", "running_var"), node.args[1:], strict=True)) | dict(node.kwargs)
    owner = str(getattr(given["running_mean"], "target", "")).rpartition(".")[0]
    own = all(
        isinstance(one := given.get(name), Node) and (one.op, one.target) == ("get_attr", f"{owner}.{name}")
        for name in ("running_mean", "running_var", "weight", "bias")
    )
    norm = layers.root.get_submodule(owner) if own else None
    is_norm = isinstance(norm, nn.BatchNorm2d) and given.get("training") is False and given.get("eps") == norm.eps
    return norm if is_norm else None  # type: ignore[return-value]  # which mypy does not see


def pad_first_convolutions(layers: LayerGraph) -> list[FusedConvolution]:
    """Let convolutions of three channels read four, in half precision, if they alone read the input; returns them."""
    placeholder = next(node for node in layers.graph.nodes if node.op == "placeholder")
    found = []
    for node in placeholder.users:
        conv = layers.layer(node)
        if not isinstance(conv, FusedConvolution) or node.args != (placeholder,):
            return []
        if conv.weight.dtype not in HALVES or conv.groups != 1 or conv.weight.shape[1] != PADDED_CHANNELS - 1:
            return []
        found.append(conv)
    for conv in found:
        conv.pad()
    return found


def _following(layers: LayerGraph, node: Node) -> str | None:
    """Return the name of an activation that may follow a convolution, if a node is one."""
    if _is_relu(layers, node):
        return "relu"
    names: dict[Any, str] = {nn.SiLU: "silu", nn.Hardswish: "hardswish", nn.ReLU6: "relu6"}
    functions: dict[Any, str] = {F.silu: "silu", F.hardswish: "hardswish", F.relu6: "relu6"}
    gelus = {"none": "gelu", "tanh": "gelu_tanh"}
    if node.op == "call_function" and len(node.args) == 1:
        if node.target is F.gelu and node.kwargs.keys() <= {"approximate"}:
            return gelus.get(str(node.kwargs.get("approximate", "none")))
        return functions.get(node.target)
    layer = layers.layer(node)
    if type(layer) is nn.GELU:
        return gelus.get(layer.approximate)
    is_other = isinstance(layer, nn.ReLU6) and (layer.min_val, layer.max_val) != (0.0, 6.0)
    return None if is_other else names.get(type(layer))


def _fuse_following(layers: LayerGraph, last: Node, following: str) -> None:
    """Move an activation, and a sum before it, into the convolution whose output they act on."""
    value = last.args[0] if last.args else None
    if not isinstance(value, Node) or only_user(value) is not last:
        return
    conv = _open_convolution(layers, value)
    if conv is None:
        if (conv := _fuse_sum(layers, value, last)) is not None:
            conv.following = following
    elif undisturbed(layers, value, last, set()):
        conv.following = following
        layers.replace(last, layers.insert(last, str(value.target), *_nodes(value)), value)


def _fuse_sum(layers: LayerGraph, value: Node, last: Node | None = None) -> FusedConvolution | None:
    """Move a sum, and what ``last`` makes of it, into the convolution of a summand; returns that, if there is one."""
    operands = _summands(value)
    if operands is None:
        return None
    last = last or value
    changed_in_place = value.op == "call_method" and value.target == "add_" or value.target is IN_PLACE["iadd"]
    # With two convolutions the first one in the graph takes the sum; in a residual block that is the main branch.
    order = list(layers.graph.nodes)
    for node in operands[:1] if changed_in_place else sorted(operands, key=order.index):
        other = operands[1] if node is operands[0] else operands[0]
        conv = _open_convolution(layers, node)
        if conv is None or len(node.args) > 1 or not undisturbed(layers, node, last, {value}):
            continue
        summand = _open_convolution(layers, other)
        if summand is not None and len(other.args) == 1 and conv.may_take_bias_of(summand):
            conv.take_bias_of(summand)
        conv.sum = "in place" if changed_in_place else "convolution first" if node is operands[0] else "summand first"
        replaced = (value, node) if last is not value else (node,)
        layers.replace(last, layers.insert(last, str(node.target), *_nodes(node), other), *replaced)
        return conv
    return None


def _open_convolution(layers: LayerGraph, node: Node) -> FusedConvolution | None:
    """Return the convolution that a node calls, without an activation yet, if one node alone uses its output."""
    layer = layers.layer(node)
    if isinstance(layer, FusedConvolution) and only_user(node) is not None:
        return None if layer.gives_bias or layer.following else layer
    return None


def replace_max_pools(layers: LayerGraph) -> int:
    """Replace max-pools by :func:`auxhead.kernels.max_pool2d`, and return how many there were."""
    replaced = 0
    for node in list(layers.graph.nodes):
        arguments = _max_pool_arguments(layers, node)
        if arguments is not None:
            with layers.graph.inserting_before(node):
                layers.replace(node, layers.graph.call_function(max_pool2d, (node.args[0], *arguments)))
            replaced += 1
    return replaced


def _max_pool_arguments(layers: LayerGraph, node: Node) -> tuple[Any, Any, Any] | None:
    """Return kernel size, stride and padding of a max-pool that has nothing else."""
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    layer = layers.layer(node)
    if type(layer) is nn.MaxPool2d:
        given = {name: getattr(layer, name) for name in names}
    elif node.op == "call_function" and node.target in MAX_POOL_FUNCTIONS and node.args:
        given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    else:
        return None
    plain = given.get("dilation", 1) in (1, (1, 1), [1, 1])
    exact = given.get("stride") in (1, (1, 1), [1, 1])  # no window is left over, which ceil_mode would take
    plain &= (given.get("ceil_mode", False) is False or exact) and given.get("return_indices", False) is False
    arguments = given.get("kernel_size"), given.get("stride") or None, given.get("padding", 0)
    return arguments if plain and arguments[0] is not None else None


def _nodes(node: Node) -> list[Node]:
    return [each for each in node.args if isinstance(each, Node)]


def _is_relu(layers: LayerGraph, node: Node) -> bool:
    return (
        type(layers.layer(node)) is nn.ReLU
        or (node.op == "call_function" and node.target in RELU_FUNCTIONS)
        or (node.op == "call_method" and node.target in ("relu", "relu_"))
    )


def _summands(node: Node) -> list[Node] | None:
    """Return the two operands of a plain sum of two nodes."""
    is_sum = (node.op == "call_function" and node.target in ADD_FUNCTIONS) or (
        node.op == "call_method" and node.target in ("add", "add_")
    )
    operands = _nodes(node)
    return operands if is_sum and len(node.args) == len(operands) == 2 and not node.kwargs else None


ADAPTIVE_POOL_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d,
}


def take_off_classifier(layers: LayerGraph) -> FusedAuxHead | str:
    """End the graph at the input of its classifier and return that as a fused head, or why there is none.

    A classifier is the Linear that makes the output, and before it, as far as nothing else uses what they make, a
    flatten and a pool over the whole map or a grid of it.
    """
    output = next(node for node in reversed(layers.graph.nodes) if node.op == "output")
    linear_node = output.args[0]
    linear = layers.layer(linear_node)
    if not isinstance(linear_node, Node) or type(linear) is not nn.Linear or only_user(linear_node) is None:
        return "the output is not that of a Linear"
    if any(parameter.is_neg() for parameter in linear.parameters()):
        return "its parameters are lazily negated, which a fused head in a graph would not see"
    tail: list[Node] = [linear_node]
    parts: list[nn.Module] = [linear]
    value: Any = linear_node.args[0]
    if only_user(value) is not None and (flattens := _flattens(layers, value)):
        tail += flattens
        parts.insert(0, nn.Flatten())
        value = value.args[0]
    is_free = isinstance(value, Node) and set(value.users) <= set(tail)
    if is_free and (pool := _whole_pool(layers, value, flattened=len(parts) > 1)) is not None:
        tail.append(value)
        parts[:] = [pool, nn.Flatten(), linear]
        value = value.args[0]
    if not undisturbed(layers, tail[-1], output, set(tail)):
        return "what comes behind it may change in place what it reads"
    try:
        head = FusedAuxHead.from_module(nn.Sequential(*parts).eval())
    except ValueError as error:
        return str(error)
    output.args = (value,)
    for node in (each for each in tail if not each.users):
        layers.graph.erase_node(node)
    return head


def _flattens(layers: LayerGraph, value: Node) -> list[Node]:
    """Return a node that flattens each sample, and those that read their number for ``y.view(y.size(0), -1)``."""
    layer = layers.layer(value)
    if type(layer) is nn.Flatten:
        return [value] if (layer.start_dim, layer.end_dim) == (1, -1) else []
    if value.target in ("view", "reshape") and len(value.args) == 3 and value.args[2] == -1 and not value.kwargs:
        y, size, _ = value.args
        if isinstance(size, Node) and size.target is operator.getitem and size.args[1] == 0:
            shape: Any = size.args[0]
            of_batch = shape.args == (y, "shape") or (shape.target == "size" and shape.args == (y,))
            return [value, size, shape] if of_batch else []
        return [value, size] if isinstance(size, Node) and size.target == "size" and size.args == (y, 0) else []
    given = dict(zip(("start_dim", "end_dim"), value.args[1:], strict=False)) | dict(value.kwargs)
    flattens = value.target is torch.flatten or value.target == "flatten"
    return [value] if flattens and (given.get("start_dim", 0), given.get("end_dim", -1)) == (1, -1) else []


def _whole_pool(layers: LayerGraph, value: Node, *, flattened: bool) -> nn.Module | None:
    """Return the pool that a node computes, as a module, if it does so over all of a map."""
    layer = layers.layer(value)
    if flattened and type(layer) in (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d):
        return layer
    known = flattened and value.target in ADAPTIVE_POOL_FUNCTIONS
    if known and len(value.args) == 2 and not any(value.kwargs.values()):
        return ADAPTIVE_POOL_FUNCTIONS[value.target](value.args[1])
    if value.target in (torch.mean, "mean") and value.op in ("call_function", "call_method"):
        given = dict(zip(("dim", "keepdim"), value.args[1:], strict=False)) | dict(value.kwargs)
        dims = given.pop("dim", None)
        keeps = given.pop("keepdim", False)
        if not given and keeps is flattened and isinstance(dims, (list, tuple)):
            return nn.AdaptiveAvgPool2d(1) if sorted(dims) in ([2, 3], [-2, -1]) else None
    return None
