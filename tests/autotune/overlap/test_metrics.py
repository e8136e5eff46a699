"""Metrics of overlap in traces made by hand; every expected number is computed by hand, too."""

import pytest
from auxhead.autotune.measuring.cuda_calls import HEAD_KERNEL, PACK_KERNEL
from auxhead.autotune.overlap.metrics import (
    hiding_efficiency,
    kernel_stretches,
    median_replay,
    overlap_of,
    spreads,
)
from auxhead.autotune.overlap.replays import JOIN, SIDE, TRUNK, read_replays
from auxhead.kernels.jit import exits as exit_kernel
from auxhead.kernels.jit import pack
from support.example_traces import event, kernel, replay, request, runtime, trace_of

CONV, HEADS = "sm90_xmma_fprop", "exit_kernel"


def overlap(*kernels):
    (found,) = read_replays(trace_of(*replay(1, 100.0, *kernels)))
    return overlap_of(found)


def numbers(*kernels):
    """All six numbers of one replay: trunk, side, exposed, stall, join, span."""
    return tuple(overlap(*kernels))


@pytest.mark.parametrize(
    ("kernels", "wanted", "coverage"),
    [
        pytest.param(
            [(CONV, 0, 7, 10), (CONV, 10, 7, 10), (HEADS, 2, 13, 6), (HEADS, 21, 7, 3)],
            (20, 6, 0, 4, 3, 24), 1.0, id="nested",
        ),
        pytest.param(
            [(CONV, 0, 7, 10), (HEADS, 10, 13, 5), (CONV, 15, 7, 5), (HEADS, 20, 7, 2)],
            (15, 5, 5, 2, 2, 22), 0.0, id="touching covers nothing",
        ),
        pytest.param(
            [(CONV, 0, 7, 4), (HEADS, 6, 13, 3), (CONV, 12, 7, 4), (HEADS, 18, 7, 2)],
            (8, 3, 3, 4, 2, 20), 0.0, id="disjoint",
        ),
        pytest.param(
            [(CONV, 0, 7, 10), (HEADS, 6, 13, 8), (CONV, 12, 7, 8), (HEADS, 20, 7, 2)],
            (18, 8, 2, 2, 2, 22), 0.75, id="straddling a gap of the trunk",
        ),
        pytest.param(
            [(CONV, 0, 7, 10), (HEADS, 8, 13, 8), (HEADS, 20, 7, 2)],
            (10, 8, 6, 12, 2, 22), 0.25, id="straddling the trunk's end",
        ),
        pytest.param(
            [(CONV, 0, 7, 30), (HEADS, 2, 13, 8), (HEADS, 6, 14, 8), (HEADS, 31, 7, 1)],
            (30, 12, 0, 2, 1, 32), 1.0, id="heads beside each other count once",
        ),
        pytest.param(
            [(CONV, 0, 7, 10), (CONV, 4, 9, 10), (HEADS, 8, 13, 8), (HEADS, 17, 7, 1)],
            (14, 8, 2, 4, 1, 18), 0.75, id="a trunk on two streams",
        ),
        pytest.param([(CONV, 0, 7, 10), (HEADS, 11, 7, 4)], (10, 0, 0, 5, 4, 15), None, id="no heads beside"),
        pytest.param([(CONV, 0, 7, 10), (CONV, 11, 7, 4)], (14, 0, 0, 0, 0, 15), None, id="no heads at all"),
    ],
)  # fmt: skip
def test_one_replay(kernels, wanted, coverage):
    assert numbers(*kernels) == wanted and overlap(*kernels).coverage == coverage
    assert numbers(*reversed(kernels)) == wanted, "a trace is in no order"


def test_replays_are_told_apart_by_the_launch_of_their_graph():
    trace = trace_of(
        request(0.0, 900.0),
        *replay(8, 500.0, (CONV, 0, 7, 10), (HEADS, 4, 9, 8), (HEADS, 13, 7, 2)),
        *replay(5, 100.0, (CONV, 0, 7, 10), (HEADS, 2, 9, 8), (HEADS, 11, 7, 2)),
        event("kernel", "copy of the input", 95.0, 3.0, stream=7, correlation=4),
        event("kernel", "of no known launch", 400.0, 3.0, stream=7),
        event("cuda_runtime", "cudaGraphLaunch_v10000", 690.0, 5.0, correlation=9),
        event("kernel", CONV, 700.25, 8.5, stream=7, correlation=9),
        event("gpu_memcpy", "Memcpy DtoD", 710.0, 2.0, stream=7, correlation=9),
        event("cuda_runtime", "cudaLaunchKernel", 94.0, 1.0, correlation=4),
    )
    first, second, third = read_replays(trace)
    assert [one.role for one in first] == [one.role for one in second] == [TRUNK, SIDE, JOIN]
    assert [one.start_us for one in second] == [0.0, 4.0, 13.0] and [one.stream for one in first] == [7, 9, 7]
    assert first[0].grid == (12, 1, 1) and first[0].block == (128, 1, 1) and first[0].registers == 40
    assert len(third) == 1 and third[0].duration_us == 8.5 and third[0].grid is None
    found = spreads([overlap_of(one) for one in (first, second, second)])
    assert found["coverage"] == (0.75, 0.75, 1.0) and found["exposed_us"] == (2.0, 0.0, 2.0)
    assert found["side_us"] == (8.0, 8.0, 8.0) and found["span_us"] == (15.0, 13.0, 15.0)
    assert found["join_stall_us"] == (5.0, 3.0, 5.0) and found["join_us"] == (2.0, 2.0, 2.0)
    assert spreads([overlap_of(third)])["coverage"] is None
    assert median_replay([first, second, third]) == 0


def test_the_median_replay_is_the_one_in_the_middle():
    spans = [50, 10, 30, 40, 20]
    trace = trace_of(*(one for k, us in enumerate(spans) for one in replay(k + 1, 100.0 * k + 1, (CONV, 0, 7, us))))
    replays = read_replays(trace)
    assert [median_replay(replays[:count]) for count in (1, 2, 3, 4, 5)] == [0, 0, 2, 3, 2], "or the next longer"


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (trace_of(request(0.0, 5.0), runtime("cudaGraphLaunch", 1.0, 2.0)), "got no GPU kernels, wants"),
        (trace_of(kernel(1.0, 2.0), kernel(5.0, 2.0)), "got 2 GPU kernels and none with the correlation of"),
    ],
)
def test_a_trace_without_replays_says_what_is_missing(trace, message):
    with pytest.raises(ValueError, match=f"^trace: .*{message}.*`auxhead-tune overlap MODEL` records and reads one$"):
        read_replays(trace)


def test_stretch_kernel_by_kernel():
    def run(launch, begin, first, second, *last):
        kernels = (("pool", 0, 7, first), (CONV, 30, 7, second), *last)
        return replay(launch, begin, *kernels)

    bare = [run(1, 100, 4, 10, ("classifier", 60, 7, 2)), run(2, 200, 6, 10, ("classifier", 60, 7, 2))]
    heads = [(HEADS, 20, 9, 8), (HEADS, 60, 7, 2)]
    both = [run(3, 100, 5, 12, *heads), run(4, 200, 5, 11, *heads), run(5, 300, 9, 14, *heads)]
    alone, beside = (read_replays(trace_of(*(one for each in runs for one in each))) for runs in (bare, both))
    first, second = kernel_stretches(alone, beside)
    assert first == ("pool", 5.0, 5.0) and second == (CONV, 10.0, 12.0)
    assert kernel_stretches(alone[:1], beside[1:2]) == [("pool", 4.0, 5.0), (CONV, 10.0, 11.0)], "of one replay each"
    with pytest.raises(ValueError, match="other kernels without heads"):
        kernel_stretches(beside, alone)
    with pytest.raises(ValueError, match="bare: got 2 replays of different kernels"):
        kernel_stretches(read_replays(trace_of(*bare[0], *run(6, 900, 1, 1))), beside)


def test_hiding_efficiency_over_captures():
    assert hiding_efficiency([[100.0]], [[20.0]], [[100.0]]) == (1.0, 1.0, 1.0)
    assert hiding_efficiency([[100.0]], [[20.0]], [[120.0]])[0] == 0.0
    assert hiding_efficiency([[100.0]], [[20.0]], [[125.0]])[0] == -0.25
    assert hiding_efficiency([[20.0]], [[100.0]], [[110.0]])[0] == 0.5, "of the shorter one"
    # two captures of both, by the medians of their rounds: 105 and 110
    assert hiding_efficiency([[100.0, 90.0, 300.0]], [[20.0]], [[104.0, 105.0, 190.0], [110.0]]) == (0.625, 0.5, 0.75)


def test_the_names_are_those_of_the_kernels():
    assert exit_kernel.exit_kernel.fn.__name__ == HEAD_KERNEL and pack.pack_kernel.fn.__name__ == PACK_KERNEL


def test_what_packs_features_is_of_the_heads():
    """Beside the trunk, or behind it for the launch that joins."""
    packed = replay(
        1, 100.0, (CONV, 0, 7, 10), (PACK_KERNEL, 1, 9, 2), (HEADS, 3, 9, 2), (CONV, 10, 7, 10),
        (PACK_KERNEL, 21, 7, 2), (PACK_KERNEL, 23, 7, 1), (HEADS, 25, 7, 4),
    )  # fmt: skip
    (found,) = read_replays(trace_of(*packed))
    assert [one.role for one in found] == [TRUNK, SIDE, SIDE, TRUNK, JOIN, JOIN, JOIN]
    assert overlap_of(found)[:5] == (20.0, 4.0, 0.0, 9.0, 7.0)


def test_the_time_from_first_to_last_kernel_begins_with_the_first():
    """A replay may be cut out of a longer one, whose time began before."""
    (found,) = read_replays(trace_of(*replay(1, 100.0, (CONV, 0, 7, 10), (CONV, 12, 7, 8), (HEADS, 21, 7, 2))))
    assert overlap_of(found[1:]).span_us == 11.0


def test_heads_without_a_trunk():
    with pytest.raises(ValueError, match="no kernels but the heads', wants those of a trunk"):
        overlap((HEADS, 0, 7, 10), (HEADS, 11, 7, 4))
