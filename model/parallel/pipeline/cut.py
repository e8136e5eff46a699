"""``Cut``: a network cut behind its taps for stages, each of which may be elsewhere; activations as they are sent."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...early_exit_network import EarlyExitNetwork
from ...module_head import AuxHead
from ...trunk.trunk import Trunk, make_trunk
from ..segments import Segment, segments_of
from .answered import AnswerForm


class Cut(NamedTuple):
    """A network cut behind its taps, for stages on a device."""

    network: EarlyExitNetwork
    """The one whose tensors the trunk has: the network itself, or a copy on the device."""
    trunk: Trunk
    segments: Sequence[Segment]
    """Of each a module that takes what the one before hands over, at first a micro-batch, and returns a tuple: what the
    segment's head reads, or the logits, and what it hands over."""
    heads: Sequence[AuxHead]
    """Behind each segment but the last, on the device."""
    form: AnswerForm


def cut(network: EarlyExitNetwork, micro_batch: Tensor, device: torch.device, trunk: str) -> tuple[Cut, Tensor]:
    """Cut a network behind each tap.

    Args:
        network: in eval mode, its taps checked.
        micro_batch: of the one size that segments take, on any device.
        device: of the segments; where it is the network's they share its parameters.
        trunk: how the backbone is run, "as_is" or "cudnn", which is made on the device.

    Returns:
        The cut, and the micro-batch on the device, as it should lie in memory.

    Raises:
        BadInput: torch.export cannot trace the backbone, or it keeps a state.
    """
    if trunk != "as_is" and device != network.device:
        network = copy.deepcopy(network).to(device)
    micro_batch = micro_batch.to(network.device)
    made = make_trunk(network.backbone, network.taps, micro_batch, trunk, network.reading)
    micro_batch = micro_batch.contiguous(memory_format=made.memory_format)
    segments, heads = segments_of(network, made, micro_batch, device), network.exit_heads
    if device != network.device:
        heads = [copy.deepcopy(head).to(device) for head in heads]
    wide = any(segment.logits.dtype == torch.float64 for segment in segments)
    form = AnswerForm(
        heads[0].num_classes,
        torch.float64 if wide else torch.float32,
        with_probs=all(head.return_probs for head in heads),
    )
    return Cut(network, made, segments, heads, form), micro_batch.to(device)


def to_wire(x: Tensor, like: Tensor) -> Tensor:
    """Return an activation as it is sent: dense in memory, in the order in which ``like``, of the same shape, lies."""
    return (x.permute(0, 2, 3, 1) if _is_channels_last(like) else x).contiguous()


def from_wire(x: Tensor, like: Tensor) -> Tensor:
    """Return an activation as the segment takes it that ``to_wire`` has sent."""
    return x.permute(0, 3, 1, 2) if _is_channels_last(like) else x


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def wires_like(handed: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, ...]:
    """Allocate tensors as they are sent for activations like these, which may be fake ones."""
    shapes = [to_wire(each, each).shape for each in handed]
    return tuple(
        torch.empty(shape, dtype=each.dtype, device=device) for shape, each in zip(shapes, handed, strict=True)
    )
