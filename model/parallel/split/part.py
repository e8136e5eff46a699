"""``Part``: consecutive segments of a network with their heads, on one device; shared with the network, or copies."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import nn

from ...early_exit_network import EarlyExitNetwork
from ...exit_rule import ExitRule
from ...module_head import AuxHead
from ...trunk.trunk import Trunk
from ..segments import Segment


class OnDevice(NamedTuple):
    """A network on one of the devices, cut."""

    network: EarlyExitNetwork
    """The user's, or a copy."""
    trunk: Trunk
    """Of its backbone, that the segments were cut from."""
    segments: Mapping[int, Sequence[Segment]]
    """All of its backbone, by the batch size that they are for."""


class Part:
    """What one of the devices runs of a network."""

    def __init__(self, number: int, device: torch.device, there: OnDevice, start: int, end: int) -> None:
        """Take segments of a network that is on the device.

        Args:
            number: of the part, from 0.
            device: of the part.
            there: the network there.
            start: index of the part's first segment.
            end: index behind its last one.
        """
        network, trunk, segments = there
        self.number, self.device, self.start, self.end = number, device, start, end
        self._network, self._trunk = network, trunk
        self.segments = {size: of_size[start:end] for size, of_size in segments.items()}
        self.heads: list[AuxHead] = network.exit_heads[start:end]
        """One a segment, but for the classifier's."""
        self.modules = nn.ModuleList(
            [*(segment.module for of_size in self.segments.values() for segment in of_size), *self.heads]
        )

    @property
    def is_last(self) -> bool:
        """Whether it ends with the classifier."""
        return len(self.heads) < self.end - self.start

    @property
    def rules(self) -> list[ExitRule]:
        """Of its heads."""
        return [head.rule for head in self.heads]

    def choosing(self, samples: int) -> AbstractContextManager[None]:
        """Let the trunk of a captured part take the fastest algorithms for a batch size; see :meth:`Trunk.choosing`."""
        return self._trunk.choosing(samples)

    def take_rules(self, network: EarlyExitNetwork) -> None:
        """Take over the rules of the user's network where these are copies, on the current stream of the device."""
        for own, head in zip(self.rules, network.exit_heads[self.start : self.end], strict=False):
            if own is not head.rule and _values(own) != _values(head.rule):
                own.assign(head.rule)

    def refresh(self, network: EarlyExitNetwork) -> None:
        """Copy parameters and buffers of the user's network where these are copies, on the current streams."""
        now = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        with torch.no_grad():
            for name, own in (*self._network.named_parameters(), *self._network.named_buffers()):
                if own is not now[name]:
                    own.copy_(now[name])
            for own_head, head in zip(self.heads, network.exit_heads[self.start : self.end], strict=False):
                if own_head is not head:
                    own_head.load_state_dict(head.state_dict())
        self._trunk.refresh()


def _values(rule: ExitRule) -> tuple[str, float, float, bool]:
    return rule.criterion, rule.threshold, rule.temperature, rule.enabled
