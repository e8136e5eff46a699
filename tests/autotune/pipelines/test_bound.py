"""The bound of a pipeline's throughput, against requests stepped through by hand."""

import pytest
from auxhead.autotune.pipelines.bound import PipelineTimes, bound_images_s


@pytest.mark.parametrize(
    ("stages", "links", "batch", "ms"),
    [
        ([3.0], [], 80, 12.0),
        ([3.0, 2.0], [0.5], 80, 5.5 + 3 * 3.0),
        ([2.0, 3.0], [0.5], 80, 5.5 + 3 * 3.0),
        ([2.0, 3.0], [0.5], 81, 5.5 + 4 * 3.0),
        ([1.0, 1.0], [4.0], 60, 6.0 + 2 * 4.0),
    ],
    ids=["one", "first_slow", "second_slow", "one_more", "link_slow"],
)
def test_the_slowest_works_without_a_break(stages, links, batch, ms):
    assert bound_images_s(batch, 20, PipelineTimes(stages, links)) == pytest.approx(1e3 * batch / ms)
