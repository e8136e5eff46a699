"""Findings of heads, in the way of a gate or several launches that could be one; the verdict on trunk and heads."""

import pytest
from auxhead.autotune.doctor.diagnosis import find_all, weigh
from auxhead.autotune.doctor.trace import FusibleHead, Watched
from support.doctor_requests import OVERLAPPED, TRUNK, kinds, run, trace_of


def test_a_head_that_the_host_asks_before_it_goes_on_is_on_the_critical_path(tmp_path):
    ask = "trunk 6; head {} in line; trunk 1 of 2; item net.py(8): forward; "  # confidence > threshold
    trace = trace_of(f"{ask.format('exit1')}{ask.format('exit2')}trunk 6", tmp_path)
    findings = {finding.kind: finding for finding in find_all(trace)}
    assert set(findings) == {"host-wait", "gate-waits"}
    gate = findings["gate-waits"]
    assert gate.cost_us == pytest.approx(2 * (3 * 4.0 + 2.0))
    assert gate.evidence[0].startswith("exit1: 14.0 us") and len(gate.marks) == 8


def test_a_head_that_is_joined_as_soon_as_it_is_forked_is_on_the_critical_path(tmp_path):
    [finding] = find_all(trace_of(f"{'trunk 6; fork; head exit1; join; ' * 2}trunk 6", tmp_path))
    assert finding.kind == "gate-waits" and finding.cost_us == pytest.approx(24.0)
    assert "the default stream waits for stream 21" in finding.evidence[0]


def test_a_run_that_warms_up_what_is_captured_next_is_none(tmp_path):
    captured = "call cudaStreamBeginCapture 5; call cudaStreamEndCapture 5; call cudaGraphInstantiate 300"
    warmed_up = f"trunk 4; fork; {'side 40; ' * 8}join; {captured}; graph {'a:7:40 ' * 8}"
    assert kinds(trace_of(warmed_up, tmp_path)) == ["recapture"]


@pytest.mark.parametrize(
    "steps",
    [
        "trunk 20; fork; head exit1; join; trunk 1 of 3",  # behind all of the trunk
        "trunk 4; fork; trunk 4; head exit1; join; trunk 4",  # the trunk's own branch was launched before
        f"graph {'conv:7:30 ' * 4}exit_kernel:7:6 {'conv:7:30 ' * 4}exit_kernel:7:6 {'conv:7:30 ' * 4}",  # gated
    ],
)
def test_heads_behind_all_of_the_trunk_or_forked_before_its_last_launch_are_not(tmp_path, steps):
    assert kinds(trace_of(steps, tmp_path)) == []


def test_two_branches_are_no_gate(tmp_path):
    def two_branches(program):
        run(program, "trunk 4; fork")
        program.wait(25, TRUNK)
        run(program, "head exit1")
        program.kernel(12.0, 25)
        run(program, "join")
        program.wait(TRUNK, 25)
        run(program, "trunk 4")

    assert kinds(trace_of(two_branches, tmp_path)) == []


def test_heads_that_could_be_fused_are_named_with_what_they_take(tmp_path):
    heads = (FusibleHead("exit1"), FusibleHead("exit2"), FusibleHead("odd", "it has a convolution"))
    [finding] = find_all(trace_of(OVERLAPPED, tmp_path, watched=Watched(requests=3, heads=heads)))
    assert finding.kind == "fusible-heads"
    assert finding.evidence[:2] == (
        "exit1: 3 launches, 12.0 us on the device",
        "exit2: 3 launches, 12.0 us on the device",
    )
    assert "odd stays as it is: it has a convolution" in finding.evidence
    assert finding.cost_us == pytest.approx(2 * 2 * 5.0)  # four launches of the host, more than 14 us of the device
    assert "include=['exit1', 'exit2']" in finding.snippet
    alone = Watched(requests=3, heads=heads[2:])
    assert kinds(trace_of(OVERLAPPED, tmp_path, watched=alone)) == []


# The verdict.


def test_the_verdict_is_without_the_profiler_where_that_was_measured_and_knows_heads_in_line(tmp_path):
    watched = Watched(requests=3, host_us=123.0)
    told = weigh(trace_of("trunk 8; head exit1 in line; trunk 8", tmp_path, watched=watched))
    assert told.achieved_us == 123.0 and not told.profiled
    assert (told.trunk_us, told.side_us) == (pytest.approx(640.0), pytest.approx(12.0))


def test_the_verdict_on_a_graph_knows_heads_by_their_kernels_whatever_stream_they_run_on(tmp_path):
    """The driver runs a graph so: after a fork the trunk goes on on another stream, the head on the first one."""
    told = weigh(trace_of("graph conv:7:30 conv:21:60 exit_kernel:7:20", tmp_path))
    assert (told.trunk_us, told.side_us) == (pytest.approx(60.0), pytest.approx(20.0))
    assert told.is_split and told.possible_us == told.trunk_us and "The trunk takes 60.0 us" in told.sentences()[1]


def test_the_verdict_on_a_graph_of_anything_does_not_tell_trunk_and_side_apart(tmp_path):
    trace = trace_of("graph conv:7:30 conv:21:50 gemm:7:20 conv:21:10", tmp_path)
    told = weigh(trace)
    together = sum(work.us for work in trace.requests[0].work)
    assert not told.is_split and (told.trunk_us, told.side_us) == (pytest.approx(together), 0.0)
    assert told.overlapped_us == pytest.approx(together - told.possible_us) and told.overlapped_us > 0.0
    assert "does not tell" in told.sentences()[1] and not any("trunk takes" in one for one in told.sentences())


def test_the_verdict_on_a_graph_in_line_does_not_take_all_of_it_for_the_trunk(tmp_path):
    told = weigh(trace_of("graph conv:7:30 gemm:7:20", tmp_path))
    assert not told.is_split and told.possible_us == told.trunk_us == pytest.approx(50.0)
    assert told.sentences()[1] == (
        "Everything takes 50.0 us of the device, one kernel after another; a graph does not tell heads from the trunk."
    )
    told = weigh(trace_of("graph conv:7:30 conv:7:20; head exit1", tmp_path))
    assert told.is_split and (told.trunk_us, told.side_us) == (pytest.approx(50.0), pytest.approx(12.0))


def test_the_verdict_says_that_nothing_is_told_from_the_trunk_and_how_long_the_device_works(tmp_path):
    plain = "trunk 3; call cudaDeviceSynchronize 500; trunk 3"
    watched = Watched(requests=3, host_us=123.0)
    took, everything, _ = weigh(trace_of(plain, tmp_path, watched=watched)).sentences()
    assert took.startswith("A request takes 123.0 us (without a profiler); with the profiler on, 635.0 us")
    assert took.endswith(" us pass from its first kernel to its last, of which the device works 240.0 us.")
    assert everything.startswith("Everything takes 240.0 us of the device: no kernel is known to be of a head")
    assert "(with the profiler on); 635.0 us pass" in weigh(trace_of(plain, tmp_path)).sentences()[0]
