"""The bound of a pipeline's throughput, against requests stepped through by hand."""

import pytest
from auxhead.autotune.pipelines.bound import bound_images_s, bound_ms, micro_batches


@pytest.mark.parametrize(
    ("batch", "size", "leave", "counts"),
    [
        (120, 20, [0.0, 1.0], [6, 6]),
        (121, 20, [0.0, 1.0], [7, 7]),
        (120, 20, [0.5, 0.5], [6, 3]),
        (120, 20, [0.49, 0.51], [6, 4]),
        (120, 40, [0.25, 0.5, 0.25], [3, 3, 1]),
        (120, 40, [1.0, 0.0], [3, 0]),
    ],
)
def test_micro_batches_of_each_stage(batch, size, leave, counts):
    assert micro_batches(batch, size, leave) == counts


@pytest.mark.parametrize(
    ("stages", "links", "counts", "ms"),
    [
        ([3.0], [], [4], 12.0),
        ([3.0, 2.0], [0.5], [4, 4], 5.5 + 3 * 3.0),
        ([2.0, 3.0], [0.5], [4, 4], 5.5 + 3 * 3.0),
        ([1.0, 1.0], [4.0], [3, 3], 6.0 + 2 * 4.0),
        ([2.0, 3.0], [0.5], [4, 2], 5.5 + 3 * 2.0),
        ([2.0, 3.0], [0.5], [4, 0], 8.0),
    ],
    ids=["one", "first_slow", "second_slow", "link_slow", "half_leave", "all_leave"],
)
def test_shortest_time(stages, links, counts, ms):
    assert bound_ms(stages, links, counts) == pytest.approx(ms)


def test_images_a_second():
    assert bound_images_s(120, 40, [0.0, 1.0], [10.0, 5.0], [1.0]) == pytest.approx(120 / 0.036)
