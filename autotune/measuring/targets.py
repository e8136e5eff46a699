"""Targets of tuning: the heads of one shape in a network, and the two places where they are measured."""

from typing import NamedTuple

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.launch_rule import config_by_rule

#: Launched by the operator, nothing beside it.
ALONE = "alone"
#: In the launch of a runner, beside the trunk of a captured network.
NETWORK = "network"


class Target(NamedTuple):
    """All heads of one shape in a network, which one entry of a tuned table serves."""

    shape: HeadShape
    model: str
    taps: tuple[str, ...]
    """Taps of the heads of that shape."""

    @property
    def rule(self) -> LaunchConfig:
        """The rule's configuration, launched where nothing was tuned: the baseline of every measurement."""
        return config_by_rule(self.shape)

    def __str__(self) -> str:
        return f"{self.model} {self.shape.dtype}, batch {self.shape.samples}, {', '.join(self.taps)}"
