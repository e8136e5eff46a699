"""Takes the classifier off the end of a traced backbone and makes a fused head of it."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from ..fused_aux_head import FusedAuxHead
from .layer_graph import LayerGraph, only_user

ADAPTIVE_POOL_FUNCTIONS = {F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d, F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d}


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
    tail = [linear_node]
    parts: list[nn.Module] = [linear]
    value: Any = _as_flatten(layers, linear_node.args[0])
    flattened = _flattens(layers, value)
    if flattened:
        tail.append(value)
        parts.insert(0, nn.Flatten())
        value = value.args[0]
    if (pool := _whole_pool(layers, value, flattened=flattened)) is not None:
        tail.append(value)
        parts[:] = [pool, nn.Flatten(), linear]
        value = value.args[0]
    try:
        head = FusedAuxHead.from_module(nn.Sequential(*parts).eval())
    except ValueError as error:
        return str(error)
    output.args = (value,)
    for node in tail:
        layers.graph.erase_node(node)
    return head


def _as_flatten(layers: LayerGraph, value: Any) -> Any:
    """Write ``y.view(y.size(0), -1)`` as ``torch.flatten(y, 1)``, so that y has one user; else return ``value``."""
    if only_user(value) is None or value.target not in ("view", "reshape") or value.kwargs:
        return value
    y, *size = value.args
    if len(size) != 2 or size[1] != -1 or only_user(read := size[0]) is None:
        return value
    reads = [read]
    if read.target is operator.getitem and read.args[1] == 0 and only_user(shape := read.args[0]) is not None:
        reads.append(shape)
        of_batch = shape.args == (y, "shape") or (shape.target == "size" and shape.args == (y,))
    else:
        of_batch = read.target == "size" and read.args == (y, 0)
    if not of_batch:
        return value
    with layers.graph.inserting_before(value):
        flat = layers.graph.call_function(torch.flatten, (y, 1))
    layers.replace(value, flat, *reads)
    return flat


def _flattens(layers: LayerGraph, value: Any) -> bool:
    """Return whether a node flattens each sample, for one user."""
    if not isinstance(value, Node) or only_user(value) is None:
        return False
    layer = layers.layer(value)
    if type(layer) is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    given = dict(zip(("start_dim", "end_dim"), value.args[1:], strict=False)) | dict(value.kwargs)
    flattens = value.target is torch.flatten or value.target == "flatten"
    return flattens and (given.get("start_dim", 0), given.get("end_dim", -1)) == (1, -1)


def _whole_pool(layers: LayerGraph, value: Any, *, flattened: bool) -> nn.Module | None:
    """Return the pool that a node computes, as a module, if it does so over all of a map and for one user."""
    if not isinstance(value, Node) or only_user(value) is None:
        return None
    layer = layers.layer(value)
    if flattened and type(layer) in (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d):
        return layer
    if (
        flattened
        and value.target in ADAPTIVE_POOL_FUNCTIONS
        and len(value.args) == 2
        and not any(value.kwargs.values())
    ):
        return ADAPTIVE_POOL_FUNCTIONS[value.target](value.args[1])
    if value.target in (torch.mean, "mean") and value.op in ("call_function", "call_method"):
        given = dict(zip(("dim", "keepdim"), value.args[1:], strict=False)) | dict(value.kwargs)
        dims = given.pop("dim", None)
        keeps = given.pop("keepdim", False)
        if not given and keeps is flattened and isinstance(dims, (list, tuple)):
            return nn.AdaptiveAvgPool2d(1) if sorted(dims) in ([2, 3], [-2, -1]) else None
    return None
