"""Pieces of a pipelined request: the bound by them, stepped through by hand, and timelines of traces."""

import pytest
from auxhead.autotune.pipelines.pieces import PieceTimes, bound_images_s, timeline_of, work_of


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
    assert bound_images_s(batch, 20, PieceTimes(stages, links)) == pytest.approx(1e3 * batch / ms)


def event(name, category, device, ts, dur):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": {"device": device}}


def test_work_of_two_processes_lies_on_one_axis():
    """Traces have bases of their own; what is NCCL's is apart, and what runs at once or nearly so is one interval."""
    first = {
        "baseTimeNanoseconds": 5_000_000,
        "traceEvents": [
            event("conv", "kernel", 0, 100.0, 50.0),
            event("relu", "kernel", 0, 151.0, 9.0),
            event("Memcpy", "gpu_memcpy", 0, 300.0, 10.0),
            event("ncclDevKernel_SendRecv", "kernel", 0, 170.0, 20.0),
            event("cudaLaunchKernel", "cuda_runtime", 0, 0.0, 500.0),
        ],
    }
    second = {"baseTimeNanoseconds": 5_100_000, "traceEvents": [event("conv", "kernel", 1, 80.0, 40.0)]}
    found = timeline_of([*work_of(first), *work_of(second)])
    assert found.computes == [[(0.0, 60.0), (200.0, 210.0)], [(80.0, 120.0)]]
    assert found.exchanges == [[(70.0, 90.0)], []]
    assert found.span_us == 210.0


def test_a_copy_between_gpus_is_work_of_the_one_that_makes_it():
    args = {"fromDevice": 0, "inDevice": 1, "toDevice": 1}
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP", "ts": 5.0, "dur": 2.0, "args": args}
    assert work_of({"traceEvents": [copy]}) == [(1, False, 5.0, 7.0)]


def test_nothing_on_a_gpu():
    assert timeline_of(work_of({"traceEvents": []})) is None
