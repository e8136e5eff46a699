"""Arithmetic on intervals of time: unions and what two of them have in common."""

from collections.abc import Iterable, Sequence

#: Begin and end, of one unit.
Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order; those that touch become one."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def length(union: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in union)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return what lies in both of two unions, each as ``merged`` returns it."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            shared.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared
