"""``Memory``: where a tensor lies, and whether two of one storage share a byte."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

#: Steps after which two tensors count as apart: shapes that take more are nobody's slices.
_MOST_STEPS = 1_000


class Memory(NamedTuple):
    """A tensor's place."""

    pointer: int
    """Address of its first element."""
    block: int
    """Address of its storage, which is what the caching allocator gave."""
    words: str
    """Its type and shape."""
    item: int = 1
    """Bytes of an element."""
    layout: tuple[tuple[int, int], ...] = ()
    """Stride in bytes and size, of each dimension of more than one element."""

    def overlaps(self, other: "Memory") -> bool:
        """Return whether an element of one lies where an element of the other does; both are of one storage."""
        # an element of this one begins at pointer + sum of stride * index: how far are two from each other?
        apart = other.pointer - self.pointer
        least, most = apart - self.item + 1, apart + other.item - 1
        ranges: Counter[int] = Counter()
        before: Counter[int] = Counter()
        for stride, size in self.layout:
            ranges[stride] += size - 1
        for stride, size in other.layout:
            before[stride] += size - 1
        strides = sorted({*ranges, *before} - {0}, reverse=True)
        return _can_be(least, most, [(stride, -before[stride], ranges[stride]) for stride in strides])


def memory_at(tensor: Tensor) -> Memory | None:
    """Return a tensor's memory; None for those that have none of their own: empty, sparse, of subclasses."""
    try:
        pointer, block = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if not pointer or not tensor.numel():
        return None
    kind = str(tensor.dtype).removeprefix("torch.")
    item = tensor.element_size()
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    layout = tuple((stride * item, size) for stride, size in dimensions if size > 1)
    return Memory(pointer, block, f"{kind}[{', '.join(map(str, tensor.shape))}]", item, layout)


def _can_be(least: int, most: int, terms: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether a sum of ``stride * index``, the index of each from its least to its most, lies in a range.

    Strides go from the longest to the shortest: of those before it few indices leave the rest within reach.
    """
    lows, highs = [0], [0]  # of what the terms from one on can add, from the last one backwards
    for stride, first, last in reversed(terms):
        lows.append(lows[-1] + stride * first)
        highs.append(highs[-1] + stride * last)
    lows.reverse()
    highs.reverse()
    steps = 0

    def reaches(index: int, so_far: int) -> bool:
        nonlocal steps
        if index == len(terms):
            return least <= so_far <= most
        stride, first, last = terms[index]
        first = max(first, -((so_far + highs[index + 1] - least) // stride))
        last = min(last, (most - so_far - lows[index + 1]) // stride)
        for count in range(first, last + 1):
            steps += 1
            if steps > _MOST_STEPS:
                return False
            if reaches(index + 1, so_far + stride * count):
                return True
        return False

    return reaches(0, 0)
