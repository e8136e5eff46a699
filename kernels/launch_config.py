"""Every launch choice of the fused head, in one frozen dataclass from one pure function."""

import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from .head_view import HeadView

if TYPE_CHECKING:
    from .head_shape import HeadShape

#: What ``tuned_table.overriding`` puts in front of the tables; kept here, where every call of a head looks at it.
overrides: ContextVar["Mapping[tuple[HeadShape, str], LaunchConfig] | None"] = ContextVar("overrides", default=None)


class Programs(NamedTuple):
    """What a configuration makes of one head."""

    splits: int
    """Programs that pool one sample."""
    pools: int
    """Programs that pool; if split, they do the rest, too."""
    tiles: int
    """Programs that multiply; 0 if split."""
    decisions: int
    """Programs that decide about a sample; 0 if split."""
    partial_sums: int
    """Logits, or parts of them, that programs leave for those that decide."""
    features: int
    """Pooled features that programs leave for those that multiply; 0 if split."""
    zeroed: int
    """Of what programs leave for each other, numbers of 32 bits that are 0 before and after a launch."""

    @property
    def total(self) -> int:
        """Programs in all."""
        return self.pools + self.tiles + self.decisions


#: Rows of partial logits are padded to a multiple of this, so that the compiler may read and write several at a time.
ROW_UNIT = 16
#: Programs that multiply at most, with whom those that pool share the GPU; above, none share the features of a tile.
MOST_TILES = 1024
#: ``weight_buffers`` where a tile takes several steps: with four, heads of ResNet-18 and -50 took as long (H200). By
#: rule not of float32, whose multiply-adds from shared memory take all registers that a thread may have.
WEIGHT_BUFFERS = 3


def most_registers(num_warps: int) -> int:
    """Return how many registers a thread of a program may use at most: 65,536 a multiprocessor, 255 a thread.

    The compiler is always told, also that there is no cap: left alone it aims at many programs a multiprocessor, and
    saves registers by letting each load wait for the one before.
    """
    return min(255, 65_536 // (32 * num_warps))


@dataclass(frozen=True)
class LaunchConfig:
    """How the work of one fused head is cut into programs; see ``head_stages`` for the two ways.

    A program pools ``block_c * block_p`` features of a sample, or a part of their windows. Split (``block_f`` is 1), it
    multiplies them with their columns of the weight, all classes; tiled, other programs multiply the features of
    ``block_n`` samples with ``block_k`` rows of the weight. Every block is a power of two, and so are ``window_parts``.
    """

    block_n: int
    """Tiled: samples multiplied together, 1, or 16 or more (on tensor cores); split: 1."""
    block_c: int
    """Channels a pooling program."""
    block_p: int
    """Pooled positions of a channel a pooling program."""
    block_a: int
    """Elements of a window's row read in one step."""
    block_f: int
    """Tiled: features of the product in one step, 16 or more; split: 1."""
    block_k: int
    """Split: classes of the product in one step; tiled: classes of a tile, 16 or more."""
    block_s: int
    """Partial sums read in one step by the last program; tiled, these are all, and so many programs share the features
    of a tile."""
    block_j: int
    """Classes in one step of the last program's softmax."""
    window_parts: int
    """Programs that share the columns of a window; more than 1 only for an average, which adds up."""
    stages: int
    """Steps of a window whose elements are read at the same time."""
    num_warps: int
    waits: bool = False
    """Split: whether the last program of a sample waits for the others' numbers, instead of the one that arrives last
    finding itself the last by a counter. Sooner done, but it takes up room while it waits."""
    max_registers: int = 0
    """Registers a thread at most; 0 for no cap."""
    max_programs: int = 0
    """Programs of the launch at most, so that it spreads over at most that many SMs; 0 for as many as there is work."""
    weight_buffers: int = 0
    """Tiled, groups of samples: Triton's ``num_stages`` of the product, whose weight is read so many steps less one
    ahead, into shared memory, while features are waited for; 0: one step ahead, into registers."""

    @property
    def register_limit(self) -> int:
        """Registers a thread that the compiler may use."""
        return self.max_registers or most_registers(self.num_warps)

    @property
    def tiled(self) -> bool:
        """Whether other programs multiply than those that pool."""
        return self.block_f > 1

    @property
    def hands_over(self) -> bool:
        """Whether programs wait for numbers of others to appear in zeroed memory."""
        return self.tiled or self.waits

    def multiplies_alone(self, view: HeadView, classes: int) -> bool:
        """Whether one program has all features of a sample and all classes in one step, and meets no others."""
        return not self.tiled and self.block_k == self.block_j >= classes and self.programs(view, classes).splits == 1

    def programs(self, view: HeadView, classes: int) -> Programs:
        """Count programs, and what they leave for each other, for an input and its classes."""
        samples, channels = view.shape[:2]
        row = -(-classes // ROW_UNIT) * ROW_UNIT
        splits = -(-channels // self.block_c) * -(-view.positions // self.block_p) * self.window_parts
        if self.tiled:
            groups = -(-samples // self.block_n)
            tiles = groups * -(-classes // self.block_k) * self.block_s
            features = self.window_parts * samples * channels * view.positions
            sums = self.block_s * samples * row
            return Programs(splits, samples * splits, tiles, samples, sums, features, sums + features)
        partial_sums = splits * samples * row
        return Programs(splits, samples * splits, 0, 0, partial_sums, 0, partial_sums if self.waits else samples)

    @classmethod
    def choose(
        cls, view: HeadView, classes: int, *, pool_max: bool, dtype: torch.dtype, device: torch.device, place: str
    ) -> "LaunchConfig":
        """Choose from the tuned table of the device, or by rule what it does not have.

        Args:
            view: the input as the kernel reads it.
            classes: K.
            pool_max: whether windows are reduced to their maximum.
            dtype: of x and weight.
            device: of x.
            place: where the head is launched, one of ``tuned_table.PLACES``.
        """
        if overrides.get() is None:
            return chosen(view, classes, pool_max, dtype, device, place)
        return chosen.__wrapped__(view, classes, pool_max, dtype, device, place)  # not to be remembered

    @classmethod
    def by_rule(cls, view: HeadView, classes: int, *, pool_max: bool = False, element_size: int = 2) -> "LaunchConfig":
        """Choose by rule, from sizes alone.

        Args:
            view: the input as the kernel reads it.
            classes: K.
            pool_max: whether windows are reduced to their maximum.
            element_size: bytes of an element of x and weight.
        """
        samples, channels, _, _ = view.shape
        positions, window_h, window_w = view.positions, view.window_h, view.window_w
        # The constants are what was best, or near it, for the taps of ResNet-18 at batch 1 to 128 on an H200.
        columns = window_h * window_w
        features = channels * positions
        few_classes = classes <= 128
        if positions == 1 and _spreads_weight(samples, classes, window_w):
            block_f = min(max(next_power_of_2(channels), 16), 512)
            block_k = min(max(8192 // block_f, 16), 64)
            return cls(
                1, 16, 1, next_power_of_2(window_w), block_f, block_k, 1, min(next_power_of_2(classes), 1024), 1, 1, 8
            )
        tiled = _tiling_pays(samples, classes)
        # Wide blocks of channels read whole lines of memory, but leave fewer programs; where a program multiplies all
        # classes too, narrow ones spread the weight.
        only_pools = few_classes or tiled
        block_f, num_warps = 16, 4 if only_pools and columns <= 256 else 8
        while (
            block_f < 64
            and (only_pools or columns <= 1024)
            and samples * features >= (64 if only_pools else 256) * block_f
        ):
            block_f *= 2
        while block_f < 512 and features >= 512 * block_f:
            block_f *= 2
        block_p = min(next_power_of_2(positions), block_f)
        block_c = min(block_f // block_p, next_power_of_2(channels))
        block_a = min(next_power_of_2(window_w), max(8192 // (block_c * block_p), 1))
        enough = 64 if not only_pools else 128 if samples < 16 else 256
        stages = 1
        if positions == 1 and window_w >= 16 and block_f <= 64:
            pool = _global_pool(samples, channels, window_w, classes, element_size)
            if pool is not None:
                block_c = min(pool.block_c, next_power_of_2(channels))
                block_a = min(pool.block_a, next_power_of_2(window_w))
                num_warps, stages, enough = pool.num_warps, pool.stages, pool.enough
        block_j = min(next_power_of_2(classes), 1024)
        # Programs enough to read a large map through many SMs at once, each with more than one step.
        window_parts = 1
        programs = -(-channels // block_c) * -(-positions // block_p) * samples
        while (
            not pool_max
            and programs * window_parts < enough
            and window_w >= 2 * window_parts * block_a
            and window_parts < 64
        ):
            window_parts *= 2
        if tiled:
            block_k = min(max(next_power_of_2(classes), 16), 64)
            step_f = max(min((256 if samples < 64 else 128) // element_size, next_power_of_2(features)), 16)
            sums = 1 if features < 256 else 2 if features < 1024 else 4
            if element_size == 4:  # added up one after another, 512 features leave 6 times the error of 8 parts
                while 2 * sums * step_f <= features and sums < _SHARING:
                    sums *= 2
            else:
                while sums > 1 and -(-samples // 16) * -(-classes // block_k) * sums > MOST_TILES:
                    sums //= 2
            # Triton reads ahead what it can read in vectors, and waits for maps in more parts in a loop of its own
            reads_ahead = (
                features > sums * step_f and element_size < 4 and features % ROW_UNIT == 0 and window_parts <= 4
            )
            return cls(
                16, block_c, block_p, block_a, step_f, block_k, sums, block_j, window_parts, stages, num_warps,
                weight_buffers=WEIGHT_BUFFERS if reads_ahead else 0,
            )  # fmt: skip
        block_k = min(max(next_power_of_2(classes), 16), max(16384 // max(block_c * block_p, 16), 16))
        has_all = channels <= block_c and positions <= block_p and window_parts == 1
        if has_all and block_j * block_c * block_p <= 8192:
            block_k = block_j  # one program may multiply all of a sample
        config = cls(1, block_c, block_p, block_a, 1, block_k, 1, block_j, window_parts, stages, num_warps)
        splits = config.programs(view, classes).splits
        return replace(
            config,
            block_s=min(next_power_of_2(splits), max(8192 // block_j, 1), 64),
            waits=waits_by_rule(samples, classes) and splits > 1,
        )


#: Programs that share the features of a tile of float32, at most.
_SHARING = 8


class _Pool(NamedTuple):
    """How programs pool."""

    block_c: int
    block_a: int
    num_warps: int
    stages: int
    enough: int
    """Programs below which windows are divided."""


def _global_pool(samples: int, channels: int, window_w: int, classes: int, element_size: int) -> _Pool | None:
    """Choose how maps are pooled to one position a channel: what was best, or near it, beside the trunk of ResNet-18.

    Small programs find room between convolutions, and loads under way make up for their size. Where there are many
    samples, one program a sample needs to meet no others. None: nothing better is known than for other heads.
    """
    line = 128 // element_size  # channels that a line of memory holds
    if classes > 128:
        if samples >= 32:
            if samples < 64:
                return _Pool(line, 64, 8, 1, 128)
            return _Pool(line, 64, 4, 4, 256) if window_w > 64 else _Pool(512, 16, 4, 1, 0)
        return _Pool(64, 128, 8, 1, 16) if 4 <= samples < 16 and window_w > 64 else None
    if samples >= 64 and classes <= 16 and 128 <= channels <= 512 and window_w <= 1024:
        return _Pool(512, 64 if channels <= 128 else 32 if channels <= 256 else 8, 4, 4, 0)
    if samples >= 16:
        return _Pool(line, 64, 4, 4, 256)
    if window_w > 1024:
        return _Pool(16, 512, 8, 1, 128)
    if window_w > 256:
        return _Pool(16, 128, 4, 4, 0)
    if window_w > 64:
        return _Pool(16, 64, 8, 1, 0)
    return _Pool(64, 16, 4, 4, 0) if samples < 4 else _Pool(32, 16, 8, 1, 0)


def waits_by_rule(samples: int, classes: int) -> bool:
    """Whether the last program of a sample waits, if there are several: not for many numbers of many programs."""
    return samples < 64 and classes <= 128


@lru_cache(maxsize=4096)
def chosen(
    view: HeadView, classes: int, pool_max: bool, dtype: torch.dtype, device: torch.device, place: str
) -> LaunchConfig:
    """Return what ``LaunchConfig.choose`` does, for the same arguments; remembered, since every call of a head asks."""
    from . import head_shape, tuned_table  # which is made of configurations

    shape = head_shape.HeadShape.of(view, classes, pool_max=pool_max, dtype=dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    try:
        tuned = tuned_table.lookup(name, shape, place)
    except tuned_table.BadTable as error:  # a forward goes on without it
        _warn(str(error))
        tuned = None
    if tuned is not None:
        return tuned
    return LaunchConfig.by_rule(view, classes, pool_max=pool_max, element_size=dtype.itemsize)


@lru_cache
def _warn(message: str) -> None:
    """Warn once of each thing, whatever the filters."""
    warnings.warn(f"{message}; launches are chosen by rule", stacklevel=2)


def _tiling_pays(samples: int, classes: int) -> bool:
    """Whether to multiply 16 samples at a time: they read the weight once instead of 16 times, but programs wait.

    Beside the trunk the traffic counts, not the wait: with 8 heads of 1,000 classes ResNet-18 takes 6.8 % longer than
    without for 32 samples instead of 11.0 %, but 10.8 % instead of 7.5 % for 8 (H200).
    """
    return samples >= 32 and classes >= 128


def _spreads_weight(samples: int, classes: int, window_w: int) -> bool:
    """Whether programs that multiply share the rows of the weight, each for one sample.

    So a head is soonest done, but more programs wait. It pays for the heads of the last maps, which have no
    convolutions left to hide behind: ResNet-18 with 8 heads of 1,000 classes takes 164 us instead of 169 at batch 1,
    and 167 if those of larger maps are launched so, too (H200).
    """
    return samples < 4 and classes > 128 and 16 <= window_w <= 64


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
