"""Every launch choice of the fused head, in one frozen dataclass from one pure function."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchConfig:
    """How the work of one fused head is cut into programs.

    A program pools ``block_c * block_p`` features of ``block_n`` samples and multiplies them with their columns of the
    weight, all classes; the last program of its samples adds up what the others left and decides. Every block is a
    power of two.
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
    num_warps: int

    def programs(self, samples: int, channels: int, positions: int) -> tuple[int, int]:
        """Return (groups of samples, splits of the features); the launch has groups * splits programs."""
        groups = -(-samples // self.block_n)
        return groups, -(-channels // self.block_c) * -(-positions // self.block_p)

    @classmethod
    def choose(
        cls, samples: int, channels: int, positions: int, window_h: int, window_w: int, classes: int
    ) -> "LaunchConfig":
        """Choose by rule, from sizes alone.

        Args:
            samples: N.
            channels: C of the head's view.
            positions: pooled positions of a channel.
            window_h: rows of the tallest window.
            window_w: columns of the widest window.
            classes: K.
        """
        # A group of 16 samples reads the weight once instead of 16 times; it pays where the weight is the larger part
        # of what a sample reads, and costs parallelism where the map is.
        grouped = samples >= 16 and classes >= 2 * window_h * window_w
        block_n = 16 if grouped else 1
        block_p = min(next_power_of_2(positions), 64)
        # 32 channels a program spread W over enough programs at batch 1; a group needs 16 or more for a matrix product.
        features = max(128 if grouped else 32, 16)
        if positions * channels > 64 * 1024:
            features = 256 if grouped else 1024
        block_c = min(max(features // block_p, 1), next_power_of_2(channels))
        if grouped and block_c * block_p < 16:
            block_c = 16 // block_p
        tile = 8192 // (block_n * block_c * block_p)
        block_a = max(1, min(next_power_of_2(window_w), tile))
        block_k = min(max(next_power_of_2(classes), 16), 128 if grouped else max(16, 8192 // (block_c * block_p)))
        block_j = min(next_power_of_2(classes), 256 if grouped else 1024)
        block_s = max(1, min(16, 8192 // (block_n * block_j)))
        return cls(block_n, block_c, block_p, block_a, block_k, block_s, block_j, num_warps=8 if grouped else 4)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
