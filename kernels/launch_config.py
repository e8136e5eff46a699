"""Every launch choice of the fused head, in one frozen dataclass from one pure function."""

from dataclasses import dataclass, replace
from functools import lru_cache

from .head_view import HeadView


@dataclass(frozen=True)
class LaunchConfig:
    """How the work of one fused head is cut into programs.

    A program pools ``block_c * block_p`` features of ``block_n`` samples, or a part of their windows, and multiplies
    them with their columns of the weight, all classes; the last program of its samples adds up what the others left
    and decides. Every block is a power of two.
    """

    block_n: int
    """Samples a program: 1 (multiply and add), or 16 or more (tensor cores)."""
    block_c: int
    """Channels a program."""
    block_p: int
    """Pooled positions of a channel a program."""
    block_a: int
    """Elements of a window's row read in one step."""
    block_k: int
    """Classes of the product in one step."""
    block_s: int
    """Partial sums read in one step by the last program."""
    block_j: int
    """Classes in one step of the last program's softmax."""
    window_parts: int
    """Programs that share the columns of a window; more than 1 only for an average, which adds up."""
    num_warps: int

    def programs(self, samples: int, channels: int, positions: int) -> tuple[int, int]:
        """Return (groups of samples, splits of the features); the launch has groups * splits programs."""
        groups = -(-samples // self.block_n)
        blocks = -(-channels // self.block_c) * -(-positions // self.block_p)
        return groups, blocks * self.window_parts

    @classmethod
    @lru_cache(maxsize=4096)
    def choose(cls, view: HeadView, classes: int, *, pool_max: bool = False, element_size: int = 2) -> "LaunchConfig":
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
        grouped = _grouping_pays(samples, columns, classes)
        if grouped:
            block_n, block_f, block_j, num_warps = 16, 128 if element_size == 2 else 64, 256, 8
            block_k, most_parts = 128, 1
        else:
            block_n, block_f, block_j, num_warps = 1, 16, 1024, 4 if few_classes and columns <= 256 else 8
            while block_f < 64 and columns <= 1024 and samples * features >= 256 * block_f:
                block_f *= 2
            while block_f < 512 and features >= 512 * block_f:
                block_f *= 2
            block_k, most_parts = max(16384 // block_f, 16), 64
        block_p = min(next_power_of_2(positions), block_f)
        block_c = block_f // block_p if grouped else min(block_f // block_p, next_power_of_2(channels))
        block_a = min(next_power_of_2(window_w), max(8192 // (block_n * block_c * block_p), 1))
        block_k = min(max(next_power_of_2(classes), 16), block_k)
        block_j = min(next_power_of_2(classes), block_j)
        # Programs enough to read a large map through many SMs at once, each with more than one step.
        window_parts = 1
        programs = -(-channels // block_c) * -(-positions // block_p) * -(-samples // block_n)
        while (
            not pool_max
            and programs * window_parts < (128 if few_classes else 64)
            and window_w >= 2 * window_parts * block_a
            and window_parts < most_parts
        ):
            window_parts *= 2
        config = cls(block_n, block_c, block_p, block_a, block_k, 1, block_j, window_parts, num_warps)
        splits = config.programs(samples, channels, positions)[1]
        return replace(config, block_s=min(next_power_of_2(splits), max(8192 // (block_n * block_j), 1), 64))


def _grouping_pays(samples: int, columns: int, classes: int) -> bool:
    """Whether to multiply 16 samples at a time, with ``columns`` elements in the largest window.

    A group reads the weight once instead of 16 times, but its last program has 16 times as much to add up: on an H200
    it lost on maps of 7x7 to 56x56 at batch 32 and 128 with 1,000 classes. That it wins beyond these is reasoned, not
    measured.
    """
    return classes >= 16 and ((samples >= 64 and columns <= 4) or (samples >= 512 and columns <= 64))


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
