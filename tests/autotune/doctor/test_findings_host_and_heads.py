"""Findings of the host and of heads, each planted, and correct programs beside; the verdict on trunk and heads."""

import pytest
from auxhead.autotune.doctor.diagnosis import find_all, weigh
from auxhead.autotune.doctor.findings.host import find_host_waits
from auxhead.autotune.doctor.trace import FusibleHead, Noticed, Watched
from support.doctor_requests import OVERLAPPED, TRUNK, kinds, of_requests, run, trace_of


def test_a_wait_in_the_middle_is_found_with_its_line_and_what_it_costs(tmp_path):
    [finding] = find_all(trace_of("trunk 8; item my/net.py(32): forward; trunk 8", tmp_path))
    assert finding.kind == "host-wait" and finding.lines == ("my/net.py:32 in forward",)
    assert finding.what == (
        "The host waits for the device in forward, which begins at my/net.py:32, and launches the rest only then."
    )
    assert any("aten::_local_scalar_dense" in line and "`.item()`" in line for line in finding.evidence)
    # from the end of the copy to the next kernel: the wait returns 2 us later, the launch takes 5, the start 1
    assert finding.cost_us is not None and 5.0 < finding.cost_us < 15.0
    assert len(finding.marks) == 1 and finding.marks[0].stream is None
    compile(finding.snippet, "snippet", "exec")


def test_lines_seen_live_replace_the_function_that_they_are_in(tmp_path):
    steps = "trunk 8; item net.py(32): forward; trunk 8; item net.py(60): decide; trunk 8"
    lines = ("/home/me/net.py:41", "/home/me/net.py:66", "/home/me/other.py:50")
    watched = Watched(requests=1, noticed=(Noticed("host-wait", "a wait", lines),))
    findings = [*find_host_waits(trace_of(steps, tmp_path, watched=watched))]
    assert {finding.lines for finding in findings} == {("/home/me/net.py:41",), ("/home/me/net.py:66",)}
    sentence = "The host waits for the device and launches the rest only then."
    assert {finding.what for finding in findings} == {sentence}
    assert "net.py" not in " ".join(line for finding in findings for line in finding.evidence)


@pytest.mark.parametrize("after, found", [("1 of 400", ["host-wait"]), ("3 of 1", ["host-wait"]), ("1 of 1", [])])
def test_what_a_wait_holds_up_is_much_time_or_many_kernels(tmp_path, after, found):
    trace = trace_of(f"trunk 10; item my/net.py(32): forward; trunk {after}", tmp_path)
    assert [one.kind for one in find_host_waits(trace)] == found


def test_waits_are_one_finding_a_line_and_five_at_most(tmp_path):
    steps = "; ".join(f"trunk 4; item net.py({line + 10}): f{line}" for line in range(8))
    findings = [*find_host_waits(trace_of(f"{steps}; trunk 8", tmp_path))]
    assert len(findings) == 6 and "3 more places" in findings[-1].what
    assert findings[-1].cost_us == pytest.approx(3 * findings[0].cost_us, rel=0.2)


def test_a_blocking_synchronisation_is_found_in_most_requests_and_not_in_one_of_three(tmp_path):
    for times, found in ((1, []), (2, ["host-wait"])):
        requests = ["trunk 8; await device; trunk 8"] * times + ["trunk 16"] * (3 - times)
        findings = find_all(of_requests(tmp_path, *requests))
        assert [one.kind for one in findings] == found and all("wait_event" in one.snippet for one in findings)


def test_memory_of_the_driver_in_every_request_is_found_and_a_first_one_is_not(tmp_path):
    def make(program):
        run(program, "trunk 8")
        with program.function("net.py(5): forward"), program.operator("aten::empty"):
            program.call("cudaMalloc", 150.0)
        run(program, "call cudaHostAlloc 50; trunk 8")

    [finding] = find_all(trace_of(make, tmp_path))
    assert finding.kind == "allocation" and finding.cost_us == pytest.approx(200.0)
    assert finding.lines == ("net.py:5 in forward",)
    assert any("cudaMalloc once a request, 150.0 us" in line and "aten::empty" in line for line in finding.evidence)
    assert kinds(of_requests(tmp_path, "trunk 8; call cudaMalloc 150; trunk 8", *["trunk 16"] * 3)) == []


def test_memory_taken_at_the_begin_of_a_trace_that_is_not_cut_is_none(tmp_path):
    for steps, found in (("", []), ("; call cudaMalloc 300; trunk 2", ["allocation"])):
        assert kinds(of_requests(tmp_path, before=f"call cudaMalloc 300; trunk 40{steps}")) == found


def test_an_input_from_pageable_memory_is_found(tmp_path):
    [finding] = find_all(trace_of("copy HtoD Pageable; trunk 20", tmp_path))
    assert finding.kind == "pageable-copy" and finding.lines == ("loop.py:9 in step",)
    assert finding.cost_us is not None and finding.cost_us >= 100.0
    assert "pin_memory" in finding.snippet and finding.marks[0].stream == 7


def test_a_copy_to_pageable_memory_amidst_a_request_is_a_wait(tmp_path):
    [finding] = find_all(trace_of("trunk 8; copy DtoH Pageable; trunk 8", tmp_path))
    assert finding.kind == "host-wait" and "pageable" in " ".join(finding.evidence)
    assert kinds(trace_of("trunk 8; copy DtoH Pageable unawaited; trunk 8", tmp_path)) == ["pageable-copy"]


def test_a_graph_captured_in_every_request_is_one_finding_with_all_that_it_costs(tmp_path):
    [finding] = find_all(trace_of("trunk 8; capture; graph a:7:30 b:7:30", tmp_path))
    assert finding.kind == "recapture" and finding.lines == ("net.py:7 in run",)
    assert finding.cost_us == pytest.approx(20 + 100 + 5 + 3 + 100 + 5 + 2 + 35 + 1.0, abs=1.0)


@pytest.mark.parametrize("watched", [None, Watched(requests=4)])
def test_a_graph_captured_in_one_request_of_three_is_found_where_others_ran_before(tmp_path, watched):
    """As a service does that captures for each new length."""
    requests = ("trunk 8", "trunk 8; capture; graph a:7:30", "trunk 8")
    found = find_all(of_requests(tmp_path, *requests, watched=watched))
    assert [(one.kind, one.cost_us) for one in found] == (
        [] if watched is None else [("recapture", pytest.approx(270.0 / 3, abs=5.0))]
    )


def test_a_graph_captured_before_the_requests_is_none_and_one_updated_in_each_is(tmp_path):
    graph = "graph a:7:30 b:7:30"
    assert kinds(of_requests(tmp_path, *[graph] * 3, before="capture")) == []
    assert kinds(of_requests(tmp_path, *[f"call cudaGraphExecUpdate 40; {graph}"] * 3, before="capture")) == [
        "recapture"
    ]


def test_cudnns_trials_are_one_finding_and_their_waits_none(tmp_path):
    [finding] = find_all(trace_of("trunk 8; convolution 6; trunk 8", tmp_path))
    assert finding.kind == "cudnn-benchmark" and finding.lines == ("net.py:3 in forward",)
    assert finding.cost_us is not None and finding.cost_us > 6 * 25.0


RIGHT = {
    "two numbers read at the end": "trunk 30; trunk 1 of 2; item a.py(1): f; trunk 1 of 2; item a.py(1): f",
    "a wait of the caller before anything is launched": "call cudaDeviceSynchronize 30; trunk 30",
    "a wait for what is long done": "trunk 20 of 200; call cudaEventSynchronize 3; trunk 20 of 200",
    "memory of the driver's pool": "; ".join(["call cudaMallocAsync 1; trunk 1; call cudaFreeAsync 1"] * 20),
    "an input from pinned memory": "copy HtoD Pinned; trunk 20",
    "an answer in pageable memory": "trunk 30; copy DtoH Pageable",
    "convolutions without trials": "; ".join(["convolution 0"] * 12),
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_what_is_right(tmp_path, name):
    assert kinds(trace_of(RIGHT[name], tmp_path)) == []


# Heads.


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
    told = weigh(trace_of("graph conv:7:30 conv:21:60 pack_kernel:7:5 exit_kernel:7:15", tmp_path))
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
