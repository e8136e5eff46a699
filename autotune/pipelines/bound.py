"""Bound of a pipeline's throughput, from the times of its stages and links.

A request of m micro-batches passes stage 0, link 0, stage 1, ...; whoever is the slowest works without a break:

    time >= sum of (t_i + l_i) + max over all of (m_i - 1) x their time

with m_i the micro-batches that reach stage or link i: where samples have left before, fewer full ones.
"""

from collections.abc import Sequence


def micro_batches(batch: int, split_size: int, leave: Sequence[float]) -> list[int]:
    """Return how many micro-batches each stage computes, if those who stay are merged into full ones.

    Args:
        batch: samples of the request.
        split_size: samples of a micro-batch.
        leave: for each stage the share of the request's samples that leave on it; together 1.
    """
    counts, left = [], float(batch)
    for share in leave:
        counts.append(-(-round(left) // split_size))
        left -= share * batch
    return counts


def bound_ms(stage_ms: Sequence[float], link_ms: Sequence[float], counts: Sequence[int]) -> float:
    """Return the shortest time of a request in milliseconds.

    Args:
        stage_ms: of each stage, for a full micro-batch.
        link_ms: of each link to the next stage, for the same; one less.
        counts: the micro-batches that each stage computes; 0 behind the last stage that any sample reaches.
    """
    passed = [(stage_ms[0], counts[0])]
    for link, stage, count in zip(link_ms, stage_ms[1:], counts[1:], strict=True):
        passed += [(link, count), (stage, count)]
    used = [(ms, count) for ms, count in passed if count]
    return sum(ms for ms, _ in used) + max((count - 1) * ms for ms, count in used)


def bound_images_s(
    batch: int, split_size: int, leave: Sequence[float], stage_ms: Sequence[float], link_ms: Sequence[float]
) -> float:
    """Return the largest throughput in images a second; see :func:`micro_batches` and :func:`bound_ms`."""
    return 1e3 * batch / bound_ms(stage_ms, link_ms, micro_batches(batch, split_size, leave))
