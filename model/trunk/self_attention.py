"""Self-attentions that read queries, keys and values where one product leaves them, and attend in one kernel."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ...kernels import attend
from ..listening.hooks import why_not_plain
from .fused_linear import FusedLinear, are_parameters
from .layer_graph import LayerGraph


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` of one tensor with itself, without weights, masks and dropout; shares its parameters.

    PyTorch's own copies queries, keys and values before it attends: 3 launches of 10 in each block of a ViT.
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        """Compute what ``attention`` does, which is not changed."""
        super().__init__()
        self.heads, self.batch_first = attention.num_heads, attention.batch_first
        self.all_three = FusedLinear(attention.in_proj_weight, attention.in_proj_bias)
        self.out = FusedLinear(attention.out_proj.weight, attention.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within x, [N, L, E] where the batch is first, else [L, N, E], or [L, E]; returns one like it."""
        tokens = 1 if self.batch_first and x.ndim == 3 else 0
        heads = self.all_three(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key, value = (each.movedim(tokens, -2) for each in heads)
        y = attend(query, key, value, begins_early=self.out.compiled)
        output: Tensor = self.out(y.movedim(-2, tokens).flatten(-2))
        return output


class WindowAttention(nn.Module):
    """Attention within windows of a map [N, H, W, C], shifted or not, as torchvision's Swin has it; in one kernel.

    That multiplies, adds the bias, has its softmax and multiplies again, where torchvision's launches seven.
    """

    def __init__(
        self, qkv: FusedLinear, proj: FusedLinear, window: Sequence[int], heads: int, shifts: Sequence[int]
    ) -> None:
        """Attend by ``heads`` within windows of a height and a width, shifted by so many rows and columns."""
        super().__init__()
        self.qkv, self.proj = qkv, proj
        self.window, self.heads, self.shifts = tuple(window), heads, tuple(shifts)

    def forward(self, input: Tensor, bias: Tensor) -> Tensor:
        """Attend within ``input``, with a bias of relative positions, [1, heads, T, T]; returns a map like it."""
        (samples, height, width, channels), (down, right) = input.shape, self.window
        x = F.pad(input, (0, 0, 0, -width % right, 0, -height % down))
        rows, columns = x.shape[1] // down, x.shape[2] // right
        shifts = [0 if each == 1 else by for each, by in zip((rows, columns), self.shifts, strict=True)]
        x = torch.roll(x, [-by for by in shifts], (1, 2)) if any(shifts) else x
        x = _windows(x, down, right)  # [N * windows, T, C]
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key, value = (each.transpose(1, 2) for each in heads)
        if any(shifts):
            # What was rolled from the other side is another region: of each side there are the first, the last but
            # what was rolled, and that.
            region = x.new_zeros(1, rows * down, columns * right, 1)
            for dim, (window, by) in enumerate(zip(self.window, shifts, strict=True), start=1):
                at = torch.arange(region.shape[dim], device=x.device)
                part = (at >= len(at) - window).to(x.dtype) + (at >= len(at) - by).to(x.dtype)
                region = region + part.view([-1 if each == dim else 1 for each in range(4)]) * 3 ** (2 - dim)
            region = _windows(region, down, right)  # [windows, T, 1]
            bias = bias + torch.where(region == region.transpose(1, 2), 0.0, -100.0).to(bias.dtype)[:, None]
        y = self.proj(attend(query, key, value, bias, self.proj.compiled).transpose(1, 2).flatten(2))
        y = y.view(samples, rows, columns, down, right, channels).transpose(2, 3)
        y = y.reshape(samples, rows * down, columns * right, channels)
        y = torch.roll(y, shifts, (1, 2)) if any(shifts) else y
        return y[:, :height, :width].contiguous()

    def extra_repr(self) -> str:
        """Show its sizes."""
        return f"window={self.window}, heads={self.heads}, shifts={self.shifts}"


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
    out: nn.Module = attention.out_proj
    own = (attention, "in_proj_weight", "in_proj_bias"), (out, "weight", "bias")
    if not all(are_parameters(*(layer._parameters.get(name, ...) for name in names)) for layer, *names in own):
        return None
    if type(out) not in (nn.Linear, NonDynamicallyQuantizableLinear) or why_not_plain(out) is not None:
        return None
    changes = any(value is not None for name, value in node.kwargs.items() if name != "need_weights")
    has_more = attention.bias_k is not None or attention.add_zero_attn
    drops = attention.training and attention.dropout > 0
    return None if changes or has_more or drops else attention


def replace_attentions(layers: LayerGraph, begins_early: bool) -> int:
    """Replace attentions that code spells out, but for masks, dropout and scales of its own, by :func:`attend`."""
    replaced = 0
    for node in layers.graph.nodes:
        more = [*node.args[3:], *node.kwargs.values()]
        if node.target is F.scaled_dot_product_attention and len(node.args) >= 3 and not any(more):
            node.target, node.args, node.kwargs = attend, node.args[:3], {"begins_early": begins_early}
            replaced += 1
    return replaced


def replace_window_attentions(layers: LayerGraph) -> int:
    """Replace torchvision's attentions within windows by :class:`WindowAttention`; returns how many."""
    replaced = 0
    for node in list(layers.graph.nodes):
        given = dict(zip(_OF_WINDOWS, node.args, strict=False)) | dict(node.kwargs)
        drops = given.get("training", True) and (given.get("attention_dropout") or given.get("dropout"))
        if not _is_torchvisions(node) or drops or given.get("logit_scale") is not None:
            continue
        products: list[list[Any]] = [
            [given.get(f"{name}_{each}") for each in ("weight", "bias")] for name in ("qkv", "proj")
        ]
        parameters = [[_parameter(layers, each) for each in both] for both in products]
        if not all(are_parameters(*both) for both in parameters):
            continue
        qkv, proj = (FusedLinear(*both) for both in parameters)
        window, heads, shifts = (given[each] for each in ("window_size", "num_heads", "shift_size"))
        attention = WindowAttention(qkv, proj, window, heads, shifts)
        name = layers.add(f"{node.name}_fused", attention)
        layers.replace(node, layers.insert(node, name, given["input"], given["relative_position_bias"]))
        for each in (each for both in products for each in both if each is not None and not each.users):
            layers.graph.erase_node(each)
        replaced += 1
    return replaced


def _parameter(layers: LayerGraph, node: Any) -> Any:
    """Return what a ``get_attr`` node reads, and what is no node as it is."""
    return layers.parameter(node) if isinstance(node, Node) and node.op == "get_attr" else node


#: Arguments of torchvision's function, in order.
_OF_WINDOWS = (
    "input", "qkv_weight", "proj_weight", "relative_position_bias", "window_size", "num_heads", "shift_size",
    "attention_dropout", "dropout", "qkv_bias", "proj_bias", "logit_scale", "training",
)  # fmt: skip


def _is_torchvisions(node: Node) -> bool:
    name, module = (getattr(node.target, each, None) for each in ("__name__", "__module__"))
    return (module, name) == ("torchvision.models.swin_transformer", "shifted_window_attention")


def _windows(x: Tensor, down: int, right: int) -> Tensor:
    """Cut a map [N, H, W, C] into windows, [N * windows, tokens, C]."""
    x = x.unflatten(2, (-1, right)).unflatten(1, (-1, down))
    return x.transpose(2, 3).reshape(-1, down * right, x.shape[-1])
