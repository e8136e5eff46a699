"""Constants that are compiled into a launch's code, read there by name: LAUNCH are the launch's, CONFIG a place's."""

from dataclasses import dataclass
from typing import ClassVar

from ..reference.criteria import number_of
from ..reference.hidden_layers import HiddenLayers
from .head_view import HeadView
from .launch_config import ROW_UNIT, LaunchConfig, next_power_of_2


@dataclass(frozen=True, kw_only=True)
class HeadConstants(LaunchConfig):
    """A fused head's: its configuration, and what else its code depends on."""

    is_fused: ClassVar[bool] = True
    rows: int
    """Of the weight that reads the features: K, or of a head with a hidden linear layer its features."""
    classes: int
    splits: int
    """Programs that pool one sample."""
    one_window: bool
    """A channel has one window, and a program one position of it."""
    pool_max: bool
    criterion: int
    activation: int
    """Of the hidden layer; ``NO_ACTIVATION`` if there is none."""
    rectifies: bool
    norms: bool
    """There is a norm, which wants a head that is tiled, one sample at a time."""

    @classmethod
    def of(
        cls, config: LaunchConfig, view: HeadView, classes: int, *, pool_max: bool, criterion: str, hidden: HiddenLayers
    ) -> "HeadConstants":
        """Take them from a head's configuration, input and layers."""
        return cls(
            **vars(config), rows=classes if hidden.weight is None else hidden.weight.shape[0], classes=classes,
            splits=config.splits_of(view), one_window=view.positions == config.block_p == 1, pool_max=pool_max,
            criterion=number_of(criterion), activation=hidden.activation_number, rectifies=hidden.rectifies,
            norms=hidden.eps is not None,
        )  # fmt: skip

    @property
    def alone(self) -> bool:
        """True if one program has all features of a sample and all rows in one step, and needs no others."""
        return not self.tiled and self.block_k == self.block_j >= self.rows and self.splits == 1

    @property
    def parts(self) -> int:
        """Partial sums that add up to one."""
        return self.block_s if self.tiled else self.splits

    @property
    def row_width(self) -> int:
        """Elements of a sample's partial sums in memory."""
        return -(-self.rows // ROW_UNIT) * ROW_UNIT

    @property
    def sent(self) -> int:
        """Elements of a row that are sent: no more than a program that decides reads, and clears if it waits."""
        return self.row_width if self.block_j >= ROW_UNIT else -(-self.rows // self.block_j) * self.block_j

    @property
    def tiles(self) -> int:
        """Programs that multiply the features of one group of samples, each some rows and a part of the features."""
        return -(-self.rows // self.block_k) * self.block_s

    @property
    def block_l(self) -> int:
        """Rows of the last layer, each of ``block_j`` padded hidden features, that are multiplied at a time."""
        return min(next_power_of_2(self.classes), max(8192 // self.block_j, 1))

    @property
    def block_d(self) -> int:
        """Classes of which the softmax is taken in one step behind a last layer, where all are in memory."""
        return min(next_power_of_2(self.classes), 1024)


@dataclass(frozen=True)
class LogitsConstants:
    """Those of a place whose logits are given: a head that is a module of its own, or the classifier."""

    is_fused: ClassVar[bool] = False
    criterion: int


@dataclass(frozen=True)
class LaunchConstants:
    """Those of a launch for successive places of a network, or for one head alone."""

    places: tuple[HeadConstants | LogitsConstants, ...]
    classes: int
    bounded: bool
    """There are fewer programs than pieces of work."""
    merges: bool = False
    """The places' answers are merged into the network's."""
    first: int = 0
    """Exit index of the first place."""
    last: bool = False
    """Its last place is the network's."""
    patient: bool = False
    """Some head exits under patience."""

    @property
    def block_j(self) -> int:
        """Classes that are copied at a time, or of which the softmax is taken where logits are given."""
        return min(next_power_of_2(self.classes), 1024)
