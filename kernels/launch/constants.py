"""Constants that are compiled into a launch's code, read there by name: LAUNCH are the launch's, CONFIG a place's."""

from dataclasses import dataclass, field
from math import gcd
from typing import Any, ClassVar

from torch import Tensor

from ..reference.criteria import number_of
from ..reference.hidden_layers import HiddenLayers
from .head_view import HeadView
from .kernel_hash import kernel_hash
from .launch_config import MOST_AT_ONCE, ROW_UNIT, LaunchConfig, next_power_of_2, padded_row


@dataclass(frozen=True, kw_only=True)
class MapConstants:
    """How programs read a map: what the code of both kinds of launches depends on."""

    one_window: bool  # a channel has one window, or element, and so one feature
    channels_last: bool  # channels lie side by side in x
    transposes: bool  # as ``HeadView.turned``: blocks of x are transposed
    unit: int
    """Largest divisor, up to 16, of a sample's features and of the strides of the weight's rows and of samples in x.

    Triton sees it of 16 alone, and would read anything else number by number; see ``known_multiple``.
    """
    map_unit: int
    """Of maps in rows of one window, and channels last: rows or channels, samples and steps have so many elements, or a
    multiple of it."""
    pool_max: bool
    rectifies: bool


@dataclass(frozen=True, kw_only=True)
class PackConstants(MapConstants):
    """Constants of a head whose features are packed; blocks and stages are a ``LaunchConfig``'s."""

    block_c: int
    block_p: int
    block_a: int
    stages: int
    window_parts: ClassVar[int] = 1

    @classmethod
    def of(cls, config: LaunchConfig, view: HeadView, *, pool_max: bool, rectifies: bool) -> "PackConstants":
        """Make them from a head's configuration and input."""
        return cls(
            block_c=config.block_c, block_p=config.block_p, block_a=config.block_a, stages=config.stages,
            pool_max=pool_max, rectifies=rectifies, **_of_map(config, view),
        )  # fmt: skip


@dataclass(frozen=True)
class PackLaunchConstants:
    """Constants of a launch that packs features of heads."""

    heads: tuple[PackConstants, ...]
    code: str = field(default_factory=kernel_hash)  # as of ``LaunchConstants``


@dataclass(frozen=True, kw_only=True)
class HeadConstants(LaunchConfig, MapConstants):
    """Constants of a fused head: its configuration, and what else its code depends on."""

    is_fused: ClassVar[bool] = True
    rows: int  # of the weight that reads the features, ``HeadShape.classes``: K, or those of a hidden linear layer
    classes: int  # K, of the last layer
    shares: tuple[tuple[int, int], ...]  # samples and programs of each stage; see ``LaunchConfig.shares_of``
    criterion: int
    activation: int  # of the hidden layer; ``NO_ACTIVATION`` if there is none
    norms: bool  # there is a norm, which wants tiles of one sample, or features that are read
    last_unit: int  # rows of the last layer lie so many elements or a multiple of it apart
    element_size: int  # bytes of an element of the weight

    @classmethod
    def of(
        cls, config: LaunchConfig, view: HeadView, weight: Tensor, *, pool_max: bool, criterion: str,
        hidden: HiddenLayers,
    ) -> "HeadConstants":  # fmt: skip
        """Make them from a head's configuration, input and layers; ``weight`` is the last layer's."""
        first = hidden.first_weight(weight)
        return cls(
            **vars(config), **_of_map(config, view, first.stride(0), view.strides[0]), rows=first.shape[0],
            classes=weight.shape[0], shares=config.shares_of(view, weight.shape[0], hidden), pool_max=pool_max,
            criterion=number_of(criterion), activation=hidden.activation_number, rectifies=hidden.rectifies,
            norms=hidden.eps is not None, last_unit=gcd(16, weight.stride(0)), element_size=weight.element_size(),
        )  # fmt: skip

    @property
    def one_program(self) -> bool:
        """True if one program has all features of a sample and all rows in one step, and needs no others."""
        return not self.tiled and self.block_k == self.block_j >= self.rows and self.splits == 1

    @property
    def splits(self) -> int:
        """Programs that pool one sample."""
        return self.shares[0][1]

    @property
    def surveys(self) -> bool:
        """True if tiles find out about their own classes, which rows then are: never behind a hidden layer."""
        return self.surveys_of(self.rows)

    @property
    def slices(self) -> int:
        """Tiles of a sample that survey its classes."""
        return -(-self.rows // self.block_k)

    @property
    def slices_block(self) -> int:
        """``slices``, rounded up to a power of two."""
        return next_power_of_2(self.slices)

    @property
    def finishers(self) -> int:
        """Programs that decide about one sample."""
        return self.shares[2][1]

    @property
    def parts_at_once(self) -> int:
        """Parts that are added up in one step."""
        return min(self.block_s, max(8192 // self.block_j, 1)) if self.reads else self.block_s

    @property
    def row_width(self) -> int:
        """Elements of a sample's partial sums in memory."""
        return padded_row(self.rows)

    @property
    def sent(self) -> int:
        """Elements of a row that are sent: no more than a program that decides reads, and clears if it waits."""
        return self.row_width if self.block_j >= ROW_UNIT else -(-self.rows // self.block_j) * self.block_j

    @property
    def statistics_block(self) -> int:
        """Features that are taken at a time for the statistics of a norm."""
        return 4096 if self.reads else self.block_f

    @property
    def tiles(self) -> int:
        """Programs that multiply the features of one group of samples, each some rows and a part of the features."""
        return self.shares[1][1]

    @property
    def block_l(self) -> int:
        """Rows of the last layer, padded, where the program that decides has all of them at once."""
        return next_power_of_2(self.classes)

    @property
    def block_d(self) -> int:
        """Classes of which the softmax is taken in one step behind a last layer, where all are in memory."""
        return min(max(next_power_of_2(self.classes), ROW_UNIT), 1024 if self.classes <= 2048 else 2048)

    @property
    def last_row_width(self) -> int:
        """Elements of a sample's logits in memory."""
        return padded_row(self.classes)

    @property
    def last_n(self) -> int:
        """Samples that a program of the last layer multiplies; 0 if those that decide do."""
        return self.shares[3][0] if self.shares[3:] else 0

    @property
    def block_h(self) -> int:
        """Hidden features in one step of the last layer's product; three steps lie in shared memory."""
        fitting = 16384 // (self.last_rows * self.element_size)
        return max(min(next_power_of_2(self.rows), 4096 // self.last_n, fitting), 16)


@dataclass(frozen=True)
class LogitsConstants:
    """Constants of a place whose logits are given: by the classifier, a head that is a module, or a library."""

    is_fused: ClassVar[bool] = False
    criterion: int


@dataclass(frozen=True)
class LaunchConstants:
    """Constants of a launch for successive places of a network, or for one head alone."""

    places: tuple[HeadConstants | LogitsConstants, ...]
    classes: int
    bounded: bool  # there are fewer programs than pieces of work
    merges: bool = False  # the places' answers are merged into the network's
    first: int = 0  # exit index of the first place
    last: bool = False  # its last place is the network's
    patient: bool = False  # some head exits under patience
    code: str = field(default_factory=kernel_hash)
    """Triton's cache on disk tells kernels apart by their functions and by the fields of their constants: without this
    it would run those of an earlier version, of which a property had another value."""

    @property
    def block_j(self) -> int:
        """Classes that are copied at a time, or of which the softmax is taken in one step where logits are given.

        Most are at once, but not beside heads whose programs have few warps.
        """
        only_logits = all(not place.is_fused for place in self.places)
        return min(next_power_of_2(self.classes), MOST_AT_ONCE if only_logits else 1024)


def _of_map(config: LaunchConfig, view: HeadView, *strides: int) -> dict[str, Any]:
    """Return fields of ``MapConstants``; ``strides`` are those that ``unit`` is to divide."""
    stride_n, stride_c, stride_h, stride_w = view.strides
    one_window, map_unit = view.positions == config.block_p == 1, 1
    if stride_c == 1:
        map_unit = gcd(16, view.shape[1], stride_n, stride_h, stride_w)
    elif one_window and stride_w == 1:
        map_unit = gcd(config.block_a, 16, view.shape[3], stride_n, stride_c, stride_h)
    unit = gcd(16, view.shape[1] * view.positions, *strides)
    return {
        "one_window": one_window, "channels_last": stride_c == 1, "transposes": view.turned, "unit": unit,
        "map_unit": map_unit,
    }  # fmt: skip
