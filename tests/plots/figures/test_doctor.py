"""Figure "doctor": its title says what the GPU needs, or only how long it works where that cannot be told."""

import pytest
from auxhead.plots.figures.doctor import draw
from support.committed_records import records


@pytest.mark.parametrize(
    "target, said",
    [
        ("one_launch", "734 us a request, of which the GPU needs 642 at least"),
        ("graphs", "750 us a request, of which the GPU works 708"),
    ],
)
def test_the_title_says_what_the_gpu_needs_if_it_can_be_told(target, said):
    found = [one for one in records("h200/doctor.jsonl") if one.cell["target"].endswith(f":{target}")]
    _, drawn = draw(found)
    assert drawn["title"].endswith(f":{target}:\n{said}")
