"""Findings of the host: waits, allocations, copies, captures and trials, each planted, and a correct program."""

import pytest
from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.findings.host import find_host_waits
from auxhead.autotune.doctor.trace import Noticed, Watched
from support.doctor_requests import kinds, run, trace_of
from support.example_traces import Program, read


def of_requests(tmp_path, *requests, watched=None, before=""):
    """A trace of different requests."""
    program = Program()
    if before:
        run(program, before)
    for steps in requests:
        with program.request():
            run(program, steps)
        program.rest()
    return read(program.content(watched), tmp_path)


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
