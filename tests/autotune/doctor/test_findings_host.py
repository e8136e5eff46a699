"""Findings of the host: waits, allocations, copies, captures and trials, each planted, and a correct program."""

import pytest
from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.findings.host import find_host_waits
from auxhead.autotune.doctor.trace import Noticed, Watched
from support.doctor_requests import kinds, trunk
from support.example_traces import Program, read, requests_of

UP, DOWN = "HtoD (Pageable -> Device)", "DtoH (Device -> Pageable)"
PINNED = "HtoD (Pinned -> Device)"


def answer(program):
    """Reads two numbers at the end, as anybody does."""
    for _ in range(2):
        with program.operator("aten::argmax"):
            program.kernel(2.0)
        program.item()


def test_a_wait_in_the_middle_is_found_with_its_line_and_what_it_costs(tmp_path):
    def make(program):
        trunk(program)
        program.item("my/net.py(32): forward")
        trunk(program)

    [finding] = find_all(requests_of(make, tmp_path))
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
    def make(program):
        trunk(program)
        program.item("net.py(32): forward")
        trunk(program)
        program.item("net.py(60): decide")
        trunk(program)

    lines = ("/home/me/net.py:41", "/home/me/net.py:66", "/home/me/other.py:50")
    watched = Watched(requests=1, noticed=(Noticed("host-wait", "a wait", lines),))
    findings = [*find_host_waits(requests_of(make, tmp_path, watched=watched))]
    assert {finding.lines for finding in findings} == {("/home/me/net.py:41",), ("/home/me/net.py:66",)}
    sentence = "The host waits for the device and launches the rest only then."
    assert {finding.what for finding in findings} == {sentence}
    assert "net.py" not in " ".join(line for finding in findings for line in finding.evidence)


@pytest.mark.parametrize("after, us, found", [(1, 400.0, ["host-wait"]), (3, 1.0, ["host-wait"]), (1, 1.0, [])])
def test_what_a_wait_holds_up_is_much_time_or_many_kernels(tmp_path, after, us, found):
    def make(program):
        trunk(program, 10)
        program.item("my/net.py(32): forward")
        trunk(program, after, us)

    assert [one.kind for one in find_host_waits(requests_of(make, tmp_path))] == found


def test_waits_are_one_finding_a_line_and_five_at_most(tmp_path):
    def make(program):
        for line in range(8):
            trunk(program, 4)
            program.item(f"net.py({line + 10}): f{line}")
        trunk(program)

    findings = [*find_host_waits(requests_of(make, tmp_path))]
    assert len(findings) == 6 and "3 more places" in findings[-1].what
    assert findings[-1].cost_us == pytest.approx(3 * findings[0].cost_us, rel=0.2)


def test_a_blocking_synchronisation_is_found_in_most_requests_and_not_in_one_of_three(tmp_path):
    for times, found in ((1, []), (2, ["host-wait"])):
        program = Program()
        for index in range(3):
            with program.request():
                trunk(program)
                if index < times:
                    program.synchronise("cudaDeviceSynchronize")
                trunk(program)
            program.rest()
        findings = find_all(read(program.content(), tmp_path))
        assert [one.kind for one in findings] == found and all("wait_event" in one.snippet for one in findings)


def test_memory_of_the_driver_in_every_request_is_found_and_a_first_one_is_not(tmp_path):
    def make(program):
        trunk(program)
        with program.function("net.py(5): forward"), program.operator("aten::empty"):
            program.call("cudaMalloc", 150.0)
        program.call("cudaHostAlloc", 50.0)
        trunk(program)

    [finding] = find_all(requests_of(make, tmp_path))
    assert finding.kind == "allocation" and finding.cost_us == pytest.approx(200.0)
    assert finding.lines == ("net.py:5 in forward",)
    assert any("cudaMalloc once a request, 150.0 us" in line and "aten::empty" in line for line in finding.evidence)

    program = Program()
    for index in range(4):
        with program.request():
            trunk(program)
            if index == 0:
                program.call("cudaMalloc", 150.0)
            trunk(program)
        program.rest()
    assert kinds(read(program.content(), tmp_path)) == []


def test_memory_taken_at_the_begin_of_a_trace_that_is_not_cut_is_none(tmp_path):
    program = Program()
    program.call("cudaMalloc", 300.0)
    trunk(program, 40)
    assert kinds(read(program.content(), tmp_path)) == []
    program.call("cudaMalloc", 300.0)
    trunk(program, 2)
    assert kinds(read(program.content(), tmp_path)) == ["allocation"]


def upload(program, way, wait=True):
    with program.function("loop.py(9): step"), program.operator("aten::copy_"):
        program.copy(way, us=90.0, host_us=100.0 if "Pageable" in way else 5.0)
        if wait:
            program.synchronise()


def test_an_input_from_pageable_memory_is_found(tmp_path):
    def planted(program):
        upload(program, UP)
        trunk(program, 20)

    [finding] = find_all(requests_of(planted, tmp_path))
    assert finding.kind == "pageable-copy" and finding.lines == ("loop.py:9 in step",)
    assert finding.cost_us is not None and finding.cost_us >= 100.0
    assert "pin_memory" in finding.snippet and finding.marks[0].stream == 7


def test_a_copy_to_pageable_memory_amidst_a_request_is_a_wait(tmp_path):
    def amidst(program):
        trunk(program)
        upload(program, DOWN)
        trunk(program)

    def unwaited(program):
        trunk(program)
        upload(program, DOWN, wait=False)
        trunk(program)

    [finding] = find_all(requests_of(amidst, tmp_path))
    assert finding.kind == "host-wait" and "pageable" in " ".join(finding.evidence)
    assert kinds(requests_of(unwaited, tmp_path)) == ["pageable-copy"]


def capture(program):
    """As torch.cuda.graph does: it waits and gives memory back first, and takes some while it captures."""
    program.call("cudaDeviceSynchronize", 20.0)
    program.call("cudaFree", 100.0)
    program.kernel(1.0, stream=25)
    with program.function("net.py(7): run"):
        program.call("cudaStreamBeginCapture", 3.0)
        program.call("cudaMalloc", 100.0)
        program.call("cudaLaunchKernel")  # captured: nothing runs
        program.call("cudaStreamEndCapture", 2.0)
        program.call("cudaGraphInstantiateWithFlags", 35.0)


def test_a_graph_captured_in_every_request_is_one_finding_with_all_that_it_costs(tmp_path):
    def make(program):
        trunk(program)
        capture(program)
        program.replay(("a", 7, 30.0), ("b", 7, 30.0))

    [finding] = find_all(requests_of(make, tmp_path))
    assert finding.kind == "recapture" and finding.lines == ("net.py:7 in run",)
    assert finding.cost_us == pytest.approx(20 + 100 + 5 + 3 + 100 + 5 + 2 + 35 + 1.0, abs=1.0)


@pytest.mark.parametrize("watched", [None, Watched(requests=4)])
def test_a_graph_captured_in_one_request_of_three_is_found_where_others_ran_before(tmp_path, watched):
    """As a service does that captures for each new length."""
    program = Program()
    for index in range(3):
        with program.request():
            trunk(program)
            if index == 1:
                capture(program)
                program.replay(("a", 7, 30.0))
        program.rest()
    found = find_all(read(program.content(watched), tmp_path))
    assert [(one.kind, one.cost_us) for one in found] == (
        [] if watched is None else [("recapture", pytest.approx(270.0 / 3, abs=5.0))]
    )


def test_a_graph_captured_before_the_requests_is_none_and_one_updated_in_each_is(tmp_path):
    for updated, found in ((False, []), (True, ["recapture"])):
        program = Program()
        capture(program)
        for _ in range(3):
            with program.request():
                if updated:
                    program.call("cudaGraphExecUpdate", 40.0)
                program.replay(("a", 7, 30.0), ("b", 7, 30.0))
            program.rest()
        assert kinds(read(program.content(), tmp_path)) == found


def convolution(program, trials):
    with program.function("net.py(3): forward"), program.operator("aten::cudnn_convolution"):
        for _ in range(trials):
            program.call("cudaDeviceSynchronize", 10.0)
            program.call("cudaEventRecord", 3.0)
            program.kernel(7.0)
            program.call("cudaEventRecord", 3.0)
            program.synchronise("cudaEventSynchronize")
        program.kernel(40.0)


def test_cudnns_trials_are_one_finding_and_their_waits_none(tmp_path):
    def planted(program):
        trunk(program)
        convolution(program, trials=6)
        trunk(program)

    [finding] = find_all(requests_of(planted, tmp_path))
    assert finding.kind == "cudnn-benchmark" and finding.lines == ("net.py:3 in forward",)
    assert finding.cost_us is not None and finding.cost_us > 6 * 25.0


def answered(program):
    trunk(program, 30)
    answer(program)


def a_wait_of_the_caller_before_anything_is_launched(program):
    program.call("cudaDeviceSynchronize", 30.0)
    trunk(program, 30)


def a_wait_for_what_is_long_done_while_the_device_has_work(program):
    trunk(program, 20, us=200.0)
    program.call("cudaEventSynchronize", 3.0)
    trunk(program, 20, us=200.0)


def memory_of_the_drivers_pool(program):
    for _ in range(20):
        program.call("cudaMallocAsync", 1.0)
        program.kernel(40.0)
        program.call("cudaFreeAsync", 1.0)


def an_input_from_pinned_memory(program):
    upload(program, PINNED, wait=False)
    trunk(program, 20)


def an_answer_in_pageable_memory(program):
    trunk(program, 30)
    upload(program, DOWN)


def convolutions_without_trials(program):
    for _ in range(12):
        convolution(program, trials=0)


def test_nothing_is_found_in_what_is_right(tmp_path):
    for make in (
        *(answered, a_wait_of_the_caller_before_anything_is_launched, memory_of_the_drivers_pool),
        *(a_wait_for_what_is_long_done_while_the_device_has_work, an_input_from_pinned_memory),
        *(an_answer_in_pageable_memory, convolutions_without_trials),
    ):
        assert kinds(requests_of(make, tmp_path)) == [], make.__name__
