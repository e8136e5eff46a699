"""The verdict: what a request takes, of trunk and heads, of graphs, with and without the profiler."""

import pytest
from auxhead.autotune.doctor.diagnosis import weigh
from auxhead.autotune.doctor.trace import Watched
from support.doctor_requests import SIDE, TRUNK, head, trunk
from support.example_traces import requests_of


def test_the_verdict_is_without_the_profiler_where_that_was_measured_and_knows_heads_in_line(tmp_path):
    def in_line(program):
        trunk(program)
        head(program, stream=TRUNK)
        trunk(program)

    told = weigh(requests_of(in_line, tmp_path, watched=Watched(requests=3, host_us=123.0)))
    assert told.achieved_us == 123.0 and not told.profiled
    assert (told.trunk_us, told.side_us) == (pytest.approx(640.0), pytest.approx(12.0))


def test_the_verdict_on_a_graph_knows_heads_by_their_kernels_whatever_stream_they_run_on(tmp_path):
    def forked(program):
        """As the driver runs a graph: after a fork the trunk goes on on another stream, the head on the first one."""
        program.replay(("conv", TRUNK, 30.0), ("conv", SIDE, 60.0), ("exit_kernel", TRUNK, 20.0))

    told = weigh(requests_of(forked, tmp_path))
    assert (told.trunk_us, told.side_us) == (pytest.approx(60.0), pytest.approx(20.0))
    assert told.is_split and told.possible_us == told.trunk_us and "The trunk takes 60.0 us" in told.sentences()[1]


def test_the_verdict_on_a_graph_of_anything_does_not_tell_trunk_and_side_apart(tmp_path):
    def forked(program):
        program.replay(("conv", TRUNK, 30.0), ("conv", SIDE, 50.0), ("gemm", TRUNK, 20.0), ("conv", SIDE, 10.0))

    trace = requests_of(forked, tmp_path)
    told = weigh(trace)
    together = sum(work.us for work in trace.requests[0].work)
    assert not told.is_split and (told.trunk_us, told.side_us) == (pytest.approx(together), 0.0)
    assert told.overlapped_us == pytest.approx(together - told.possible_us) and told.overlapped_us > 0.0
    assert "does not tell" in told.sentences()[1] and not any("trunk takes" in one for one in told.sentences())


def test_the_verdict_on_a_graph_in_line_does_not_take_all_of_it_for_the_trunk(tmp_path):
    def in_line(program):
        program.replay(("conv", TRUNK, 30.0), ("gemm", TRUNK, 20.0))

    told = weigh(requests_of(in_line, tmp_path))
    assert not told.is_split and told.possible_us == told.trunk_us == pytest.approx(50.0)
    assert told.sentences()[1] == (
        "Everything takes 50.0 us of the device, one kernel after another; a graph does not tell heads from the trunk."
    )

    def beside_heads(program):
        program.replay(("conv", TRUNK, 30.0), ("conv", TRUNK, 20.0))
        head(program)

    told = weigh(requests_of(beside_heads, tmp_path))
    assert told.is_split and (told.trunk_us, told.side_us) == (pytest.approx(50.0), pytest.approx(12.0))


def test_the_verdict_says_that_nothing_is_told_from_the_trunk_and_how_long_the_device_works(tmp_path):
    def plain(program):
        trunk(program, 3)
        program.call("cudaDeviceSynchronize", 500.0)
        trunk(program, 3)

    watched = Watched(requests=3, host_us=123.0)
    took, everything, _ = weigh(requests_of(plain, tmp_path, watched=watched)).sentences()
    assert took.startswith("A request takes 123.0 us (without a profiler); with the profiler on, 635.0 us")
    assert took.endswith(" us pass from its first kernel to its last, of which the device works 240.0 us.")
    assert everything.startswith("Everything takes 240.0 us of the device: no kernel is known to be of a head")
    profiled = weigh(requests_of(plain, tmp_path)).sentences()[0]
    assert "(with the profiler on); 635.0 us pass" in profiled
