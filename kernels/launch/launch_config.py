"""LaunchConfig: all launch choices of a fused head in one frozen dataclass, and the program counts that follow."""

from dataclasses import dataclass
from typing import NamedTuple

from ..reference.hidden_layers import NO_LAYERS, HiddenLayers
from .head_view import HeadView


class Programs(NamedTuple):
    """Program counts of one head under a configuration, and sizes of what programs leave for each other."""

    stages: tuple[int, ...]  # programs of each, as of ``shares_of``; of the second with those of a norm's statistics
    partial_sums: int  # logits, or parts of them, that programs leave for those that decide
    zeroed: int  # elements of int32 memory that a launch needs to be 0, and sets back to 0
    findings: int  # what programs that multiply leave about their classes in place of sums; see ``surveys_of``
    arrivals: int  # counters of samples that are so decided about
    last_sums: int  # the first of ``zeroed``: logits and hidden features, left for programs of the last layer

    @property
    def total(self) -> int:
        """Programs in all."""
        return sum(self.stages)


#: Rows of partial logits are padded to a multiple of this, so that the compiler may read and write several at a time.
ROW_UNIT = 16
#: Programs that multiply, at most, if they share the features of a tile: they share the GPU with those that pool.
MOST_TILES = 1024
#: Where programs that multiply find features; see ``LaunchConfig.features``, which may be "library", too.
FEATURES = ("awaited", "packed", "in place")
#: ``weight_buffers`` where a tile takes several steps: with four, heads of ResNet-18 and -50 took as long (H200).
WEIGHT_BUFFERS = 3


def most_registers(num_warps: int, cap: int = 0) -> int:
    """Return the most registers a thread may have: ``cap``, or if it is 0, of 65,536 a multiprocessor, 255 a thread.

    The compiler is told this where there is no cap, too: left alone it aims at many programs a multiprocessor, and
    saves registers by letting each load wait for the one before.
    """
    return cap or min(255, 65_536 // (32 * num_warps))


# What a field is of, by the way of ``LaunchConfig.way``; "pools", "multiplies" and "decides" are kinds of programs:
#
#                     split                  tiled                  read, packed           read, in place
# block_c, block_p    pools and multiplies   pools                  packs (before_launch)  a step of multiplies
# block_a, stages     pools                  pools                  packs                  1
# window_parts        pools                  pools                  1                      1
# block_n             1                      multiplies             multiplies             multiplies
# block_f             1                      multiplies, a step     multiplies, a step     block_c * block_p
# block_k             a step of the product  multiplies, a tile     multiplies, a tile     multiplies, a tile
# block_s             sums read at a time    shares of features     shares of features     shares of features
# block_j             decides                decides                decides                decides
# weight_buffers      0                      multiplies             multiplies             multiplies


@dataclass(frozen=True)
class LaunchConfig:
    """Launch choices of one fused head: how its work is cut into programs, in one of the ways of ``jit/head.py``.

    A program pools ``block_c * block_p`` features of a sample, or a part of their windows. Split (``block_f`` is 1), it
    multiplies them with their columns of the weight, all classes. Else other programs multiply the features of
    ``block_n`` samples with ``block_k`` rows of the weight, a tile: below, "tiled" is that with features awaited or in
    memory. Every block is a power of two, and so are ``window_parts``.
    """

    block_n: int
    """Tiled: samples multiplied together, 1, or on tensor cores 16 or more (of features in memory 8); split: 1."""
    block_c: int
    """Channels of a pooling program; see ``features`` for those in place."""
    block_p: int
    """Pooled positions of each channel of a pooling program."""
    block_a: int
    """Elements of a window read in one step: of one of its rows if each channel is one window."""
    block_f: int
    """Tiled: features of the product in one step, 16 or more; split: 1."""
    block_k: int
    """Split: classes of the product in one step; tiled: classes of a tile, 16 or more."""
    block_s: int
    """Split: partial sums that the program that decides reads in one step. Tiled: programs that share the features of a
    tile, and so partial sums in all, mostly read in one step (``HeadConstants.parts_at_once``)."""
    block_j: int
    """Classes in one step of the last program's softmax; or of the probabilities that a program writes."""
    window_parts: int
    """Programs that share the elements of a window, of one that is a channel its columns; 1 but for an average, which
    adds up."""
    stages: int
    """Steps of a window whose elements are read at the same time; nothing to do with ``Programs.stages``."""
    num_warps: int
    """Warps of a program, at most 32."""
    waits: bool = False
    """Split: the last program of a sample waits for the others' numbers; False: a counter tells the one that arrives
    last. Waiting is done sooner, but takes up room."""
    max_registers: int = 0
    """Registers of a thread, at most; 0 for no cap."""
    max_programs: int = 0
    """Programs of the launch, at most, and so SMs, for ``auxhead-tune overlap --footprints``; 0: as many as needed."""
    weight_buffers: int = 0
    """Tiled, groups of samples: Triton's ``num_stages`` of the product, whose weight is read so many steps less one
    ahead, into shared memory, while features are waited for; 0: one step ahead, into registers."""
    features: str = "awaited"
    """Tiled: where those that multiply find features. "awaited": pooled ones are sent to them number by number.
    "in place": they lie in x, of which nothing is pooled, in blocks of ``block_c`` channels by ``block_p`` positions.
    "packed": a launch of its own pools them before, or only puts them in order, in blocks of the fields that say how;
    see before_launch.py. These two multiply ``block_n`` samples of 8 or more, and ``weight_buffers`` steps lie in
    shared memory, if more than one. "library": PyTorch's operations multiply them, and a launch is given logits; see
    ``by_library``."""
    last_rows: int = 0
    """Behind a hidden layer: rows of the last layer that a program of its own multiplies, 16 or more; 0: the program
    that adds a sample's hidden features up multiplies all of them, and decides."""

    @property
    def reads(self) -> bool:
        """True if features lie in memory before they are multiplied."""
        return self.packs or self.in_place

    @property
    def by_library(self) -> bool:
        """True if PyTorch's operations multiply, and a launch is given logits."""
        return self.features == "library"

    @property
    def way(self) -> str:
        """In words: "split", "tiled", "read, packed" or "read, in place", as in ``jit/head.py``; or "library"."""
        if self.by_library:
            return "library"
        return f"read, {self.features}" if self.reads else "tiled" if self.tiled else "split"

    @property
    def packs(self) -> bool:
        """True if a launch packs the features for programs of ours; ``HeadInput.packs`` says it of a library's, too."""
        return self.features == "packed"

    @property
    def in_place(self) -> bool:
        """True if features are read where they lie in x."""
        return self.features == "in place"

    @property
    def tiled(self) -> bool:
        """True if other programs multiply than those that pool: in the ways tiled and read."""
        return self.block_f > 1

    @property
    def hands_over(self) -> bool:
        """True if programs wait for others' numbers to appear in zeroed memory."""
        return self.tiled or self.waits

    def surveys_of(self, rows: int) -> bool:
        """Return whether programs that multiply find out about their own classes, of many; see ``jit/slices.py``."""
        return self.reads and self.block_s == 1 and rows > self.block_j

    def splits_of(self, view: HeadView) -> int:
        """Count the programs of the launch that pool one sample."""
        if self.reads or self.by_library:
            return 0
        return -(-view.shape[1] // self.block_c) * -(-view.positions // self.block_p) * self.window_parts

    def shares_of(self, view: HeadView, classes: int, hidden: HiddenLayers = NO_LAYERS) -> tuple[tuple[int, int], ...]:
        """Return of each stage, in the order of programs' numbers, a number of samples and how many programs share it.

        Stages pool, multiply and add up, or decide; of a last layer with programs of its own they multiply and decide.
        """
        rows = hidden.rows(classes)
        shares = [(1, self.splits_of(view)), (1, 0), (1, int(self.by_library))]
        if self.tiled:
            finishers = -(-rows // self.block_j) if self.surveys_of(rows) else 1
            shares[1:] = [(self.block_n, -(-rows // self.block_k) * self.block_s), (1, finishers)]
        if self.last_rows and hidden.weight is not None:  # tensor cores want 8 samples or more
            shares += [(min(max(next_power_of_2(view.shape[0]), 8), 64), -(-classes // self.last_rows)), (1, 1)]
        return tuple(shares)

    def programs(self, view: HeadView, classes: int, hidden: HiddenLayers = NO_LAYERS) -> Programs:
        """Count programs, and what they leave for each other, for an input and K ``classes``."""
        samples, rows, norms = view.shape[0], hidden.rows(classes), hidden.eps is not None
        shares = self.shares_of(view, classes, hidden)
        stages = [-(-samples // group) * share for group, share in shares]
        sums = (samples * self.block_s if self.tiled else stages[0]) * padded_row(rows)
        findings = arrivals = 0
        if self.surveys_of(rows):
            sums, findings, arrivals = 0, 4 * samples * -(-rows // self.block_k), samples
        if self.reads:  # before a norm mean and scale of each sample, of programs of their own
            stages[1] += samples * norms
            zeroed = sums + arrivals + 2 * samples * norms
        elif self.tiled:
            zeroed = sums + self.window_parts * samples * view.shape[1] * view.positions  # and pooled features
        else:
            zeroed = sums if self.waits else 0 if self.by_library else samples
        last_sums = samples * (padded_row(rows) + padded_row(classes)) if stages[3:] else 0
        return Programs(tuple(stages), sums, last_sums + zeroed, findings, arrivals, last_sums)


#: Classes of which a program takes the softmax at once where logits are given: in several steps it takes twice as long.
MOST_AT_ONCE = 32768


def warps_for_logits(classes: int) -> int:
    """Return the warps of a program that decides by logits."""
    return 4 if classes <= 2048 else 8 if classes <= 8192 else 16


def by_library(classes: int) -> LaunchConfig:
    """Return the configuration of a library's product and a launch that decides by its logits, nothing being packed."""
    return LaunchConfig(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, warps_for_logits(classes), features="library")


def padded_row(count: int) -> int:
    """Return how many elements of memory a row of so many numbers takes."""
    return -(-count // ROW_UNIT) * ROW_UNIT


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
