"""Occupancy in tiers: residency by hand-computed programs, and the profiler's estimates."""

import pytest
import torch
from auxhead.autotune.overlap.occupancy import (
    TIERS,
    ProfilerEstimate,
    check_turns,
    measured_residency,
    profiler_estimates,
)
from auxhead.kernels.launch.residency import Residency


def launch(*turns, num_warps=4):
    """Turns in microseconds, as SM, start and end."""
    rows = [(sm, 1000 * start, 1000 * end) for sm, start, end in turns]
    return Residency(torch.tensor(rows, dtype=torch.int64), len(rows), num_warps)


def test_residency_is_what_programs_took_of_all_there_is():
    """On SM 0 two programs overlap for 2 of 6 us, on SM 3 a launch of more warps follows another after a pause."""
    first = launch((0, 10, 14), (0, 12, 16), (3, 11, 12))
    second = launch((3, 13, 16), num_warps=8)
    found = measured_residency([first, second], sm_count=4, sm_warps=64, span_us=100.0)
    assert found.sms == 2 and found.us == pytest.approx(6.0)
    assert found.sm_share == pytest.approx((6.0 + 1.0 + 3.0) / (4 * 100.0))
    assert found.warps_share == pytest.approx((4 * (4.0 + 4.0 + 1.0) + 8 * 3.0) / (4 * 64 * 100.0))


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ((-1, -1, -1), "1 of 2 were not recorded"),
        ((4, 1, 2), "an SM of 4"),
        ((0, 3, 2), "before"),
        ((0, 0, 0), "before"),
    ],
    ids=["silent", "no such SM", "ends before it starts", "interpreted"],
)
def test_programs_that_cannot_be(turn, says):
    with pytest.raises(ValueError, match=says):
        check_turns(launch((1, 1, 2), turn), sm_count=4)


def test_nothing_recorded():
    with pytest.raises(ValueError, match="got none"):
        measured_residency([], sm_count=4, sm_warps=64, span_us=1.0)


def test_the_profilers_estimates_by_replay_with_their_zeros():
    def kernel(name, at, replay, percent):
        arguments = {"correlation": replay, "est. achieved occupancy %": percent}
        return {"ph": "X", "cat": "kernel", "name": name, "ts": at, "dur": 1.0, "args": arguments}

    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            kernel("exit_kernel", 30.0, 2, 5),
            kernel("exit_kernel", 20.0, 2, 0),
            kernel("conv", 15.0, 1, 50),
            kernel("exit_kernel", 10.0, 1, 7),
        ]
    }
    assert profiler_estimates(trace) == [
        [ProfilerEstimate(7.0, False)],
        [ProfilerEstimate(0.0, True), ProfilerEstimate(5.0, False)],
    ]


def test_tiers_say_what_is_measured():
    assert list(TIERS) == ["theoretical", "estimate", "residency"]
    assert [name for name, says in TIERS.items() if "measured" in says.replace("nothing is measured", "")] == [
        "residency"
    ]
