"""What a sweep asks of whatever measures for it: a GPU, records, or a simulation."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ...kernels.head_shape import HeadShape
from ...kernels.launch_config import LaunchConfig
from ...kernels.launch_rule import config_by_rule
from ..records.comparison import Paired
from .failures import Failure

#: Launched by the operator, nothing beside it.
ALONE = "alone"
#: In the launch of a runner, beside the trunk of a captured network.
NETWORK = "network"


class Target(NamedTuple):
    """What is tuned: all heads of one shape in a network, which one entry of a table serves."""

    shape: HeadShape
    model: str
    taps: tuple[str, ...]
    """Whose heads have that shape."""

    @property
    def rule(self) -> LaunchConfig:
        """What is launched where nothing was tuned: the baseline of every measurement."""
        return config_by_rule(self.shape)

    def __str__(self) -> str:
        return f"{self.model} {self.shape.dtype}, batch {self.shape.samples}, {', '.join(self.taps)}"


class Measurer(Protocol):
    """Measures configurations of a target, all in one place: ``ALONE`` or ``NETWORK``.

    The first configuration of a call is the rule's. It is the baseline: where it fails, nothing is timed.
    """

    def begin_to_compile(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> None:
        """Compile beside whatever else is measured, if that can be; ``compile`` is asked for them later."""
        ...

    def compile(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Compile in parallel, ahead of timing, and return what failed."""
        ...

    def check(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Compare answers with the truth while other work runs beside, and return what failed."""
        ...

    def alone(
        self, target: Target, configs: Sequence[LaunchConfig], rounds: int, captures: int
    ) -> Mapping[LaunchConfig, Paired | Failure]:
        """Time heads by themselves, each in fresh captures and all in the same rounds; microseconds of a launch."""
        ...

    def in_situ(
        self, target: Target, configs: Sequence[LaunchConfig], rounds: int, captures: int
    ) -> Mapping[LaunchConfig, Paired | Failure]:
        """Time the whole network with its heads, each in fresh captures and all in the same rounds; microseconds."""
        ...
