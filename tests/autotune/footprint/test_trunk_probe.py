"""What a trunk leaves free, from hand-computed programs of the probe."""

import pytest
import torch
from auxhead.autotune.footprint.trunk_probe import PARTS, room


def turns(*rows):
    return torch.tensor(rows, dtype=torch.int64)


#: Two programs at a time on each of two SMs, for 400 ns.
IDLE = turns(*((sm, start, start + 100) for sm in (0, 1) for start in (0, 100, 200, 300) for _ in range(2)))


def test_room_is_a_share_of_what_the_idle_gpu_holds():
    """A trunk from 1000 to 1200: SM 0 holds one program all the time, SM 1 two in its second half."""
    beside = turns((0, 990, 1100), (0, 1100, 1210), (1, 1100, 1200), (1, 1100, 1205))
    found = room(IDLE, beside, (1000, 1200), trunk_us=0.16, sm_count=2)
    assert found.by_sm == pytest.approx([0.5, 0.5]) and found.idle_programs == pytest.approx(2.0)
    assert found.by_time == pytest.approx([0.25] * (PARTS // 2) + [0.75] * (PARTS // 2))
    assert found.stretch == pytest.approx(1.25)


def test_a_full_trunk_and_none():
    around = ((0, 900, 1000), (0, 1200, 1300))
    assert room(IDLE, turns(*around), (1000, 1200), 0.2, 2).by_sm == [0.0, 0.0]
    everywhere = turns(*((sm, 900, 1300) for sm in (0, 1) for _ in range(2)))
    assert room(IDLE, everywhere, (1000, 1200), 0.2, 2).by_sm == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("row", [(0, 1001, 1300), (0, 900, 1199)], ids=["late", "early"])
def test_a_probe_that_was_not_there_all_the_time(row):
    with pytest.raises(ValueError, match="the probe began after the trunk or ended before it"):
        room(IDLE, turns(row), (1000, 1200), 0.2, 2)
