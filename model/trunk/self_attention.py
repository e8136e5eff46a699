"""``SelfAttention``: a multi-head self-attention that reads queries, keys and values where one product leaves them."""

import operator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from .layer_graph import LayerGraph


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` of one tensor with itself, without weights, masks and dropout; shares its parameters.

    PyTorch's own copies queries, keys and values before it attends: 3 launches of 10 in each block of a ViT.
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        """Compute what ``attention`` does, which is not changed."""
        super().__init__()
        self.heads, self.batch_first = attention.num_heads, attention.batch_first
        self.weight, self.bias = attention.in_proj_weight, attention.in_proj_bias
        self.out = attention.out_proj

    def forward(self, x: Tensor) -> Tensor:
        """Attend within x, [N, L, E] where the batch is first, else [L, N, E], or [L, E]; returns one like it."""
        tokens = 1 if self.batch_first and x.ndim == 3 else 0
        heads = F.linear(x, self.weight, self.bias).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key, value = (each.movedim(tokens, -2) for each in heads)
        y = F.scaled_dot_product_attention(query, key, value)
        return F.linear(y.movedim(-2, tokens).flatten(-2), self.out.weight, self.out.bias)


def replace_self_attentions(layers: LayerGraph) -> int:
    """Replace multi-head attentions of one tensor with itself by :class:`SelfAttention`; returns how many."""
    replaced = 0
    for node in list(layers.graph.nodes):
        attended = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        rest = [user for user in node.users if user not in attended]
        unused = all(user.target is operator.getitem and not user.users for user in rest)
        attention = _self_attention(layers, node)
        if attention is None or not attended or not unused:
            continue
        name = layers.add(f"{node.target}_fused", SelfAttention(attention))
        new = layers.insert(node, name, node.args[0])
        for user in attended:
            layers.replace(user, new)
        for each in (*rest, node):
            layers.graph.erase_node(each)
        replaced += 1
    return replaced


def _self_attention(layers: LayerGraph, node: Any) -> nn.MultiheadAttention | None:
    """Return the attention that a node calls with one tensor three times and nothing that changes the answer."""
    if not isinstance(node, Node) or node.op != "call_module" or len(set(node.args)) != 1 or len(node.args) != 3:
        return None
    attention = layers.plain(node)
    if type(attention) is not nn.MultiheadAttention or attention.in_proj_weight is None:
        return None
    changes = any(value is not None for name, value in node.kwargs.items() if name != "need_weights")
    has_more = attention.bias_k is not None or attention.add_zero_attn
    drops = attention.training and attention.dropout > 0
    return None if changes or has_more or drops else attention
