"""Findings of heads, in the way of a gate or several launches that could be one; the verdict on trunk and heads."""

import pytest
from auxhead.autotune.doctor.diagnosis import find_all, weigh
from auxhead.autotune.doctor.trace import FusibleHead, Watched
from support.doctor_requests import SIDE, TRUNK, head, kinds, overlapped, trunk
from support.example_traces import requests_of


def test_a_head_that_the_host_asks_before_it_goes_on_is_on_the_critical_path(tmp_path):
    def make(program):
        for name in ("exit1", "exit2"):
            trunk(program, 6)
            head(program, name, TRUNK)
            program.kernel(2.0, TRUNK)  # confidence > threshold
            program.item("net.py(8): forward")
        trunk(program, 6)

    findings = {finding.kind: finding for finding in find_all(requests_of(make, tmp_path))}
    assert set(findings) == {"host-wait", "gate-waits"}
    gate = findings["gate-waits"]
    assert gate.cost_us == pytest.approx(2 * (3 * 4.0 + 2.0))
    assert gate.evidence[0].startswith("exit1: 14.0 us") and len(gate.marks) == 8


def test_a_head_that_is_joined_as_soon_as_it_is_forked_is_on_the_critical_path(tmp_path):
    def make(program):
        for _ in range(2):
            trunk(program, 6)
            program.wait(SIDE, TRUNK)
            head(program)
            program.wait(TRUNK, SIDE)
        trunk(program, 6)

    trace = requests_of(make, tmp_path)
    [finding] = find_all(trace)
    assert finding.kind == "gate-waits" and finding.cost_us == pytest.approx(24.0)
    assert "the default stream waits for stream 21" in finding.evidence[0]


def test_a_run_that_warms_up_what_is_captured_next_is_none(tmp_path):
    def warmed_up(program):
        trunk(program, 4)
        program.wait(SIDE, TRUNK)
        trunk(program, 8, stream=SIDE)
        program.wait(TRUNK, SIDE)
        program.call("cudaStreamBeginCapture")
        program.call("cudaStreamEndCapture")
        program.call("cudaGraphInstantiate", 300.0)
        program.replay(*[("a", TRUNK, 40.0)] * 8)

    assert kinds(requests_of(warmed_up, tmp_path)) == ["recapture"]


def test_heads_behind_all_of_the_trunk_or_forked_before_its_last_launch_are_not(tmp_path):
    def at_the_end(program):
        trunk(program, 20)
        program.wait(SIDE, TRUNK)
        head(program)
        program.wait(TRUNK, SIDE)
        program.kernel(3.0, TRUNK)

    def branches(program):
        """The trunk's own branch was launched before that of the other stream, which waits for neither."""
        trunk(program, 4)
        program.wait(SIDE, TRUNK)
        trunk(program, 4)
        head(program)
        program.wait(TRUNK, SIDE)
        trunk(program, 4)

    def two_branches(program):
        trunk(program, 4)
        program.wait(SIDE, TRUNK)
        program.wait(25, TRUNK)
        head(program)
        head(program, stream=25)
        program.wait(TRUNK, SIDE)
        program.wait(TRUNK, 25)
        trunk(program, 4)

    def gated_graph(program):
        """As auxhead's gated runner: heads in line, in the graph that they steer."""
        segment = [("conv", TRUNK, 30.0)] * 4
        program.replay(*segment, ("exit_kernel", TRUNK, 6.0), *segment, ("exit_kernel", TRUNK, 6.0), *segment)

    for make in (at_the_end, branches, two_branches, gated_graph):
        assert kinds(requests_of(make, tmp_path)) == []


def test_heads_that_could_be_fused_are_named_with_what_they_take(tmp_path):
    heads = (FusibleHead("exit1"), FusibleHead("exit2"), FusibleHead("odd", "it has a convolution"))
    [finding] = find_all(requests_of(overlapped, tmp_path, watched=Watched(requests=3, heads=heads)))
    assert finding.kind == "fusible-heads"
    assert finding.evidence[:2] == (
        "exit1: 3 launches, 12.0 us on the device",
        "exit2: 3 launches, 12.0 us on the device",
    )
    assert "odd stays as it is: it has a convolution" in finding.evidence
    assert finding.cost_us == pytest.approx(2 * 2 * 5.0)  # four launches of the host, more than 14 us of the device
    assert "include=['exit1', 'exit2']" in finding.snippet
    alone = Watched(requests=3, heads=heads[2:])
    assert kinds(requests_of(overlapped, tmp_path, watched=alone)) == []


# The verdict.


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
