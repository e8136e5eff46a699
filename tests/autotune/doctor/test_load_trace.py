"""Traces as the doctor reads them: what is a request, what belongs to it, and what is no trace."""

import gzip
import json
import subprocess
import sys

import pytest
from auxhead.autotune.doctor import load_trace as reading
from auxhead.autotune.doctor.load_trace import load_trace
from auxhead.autotune.doctor.trace import BadTrace, FusibleHead, Watched
from auxhead.autotune.doctor.user_code import place_in_words, profiled_line
from support.example_traces import H100, Program, event, read, requests_of, trace_of


def two_kernels(program):
    program.kernel(30.0)
    program.kernel(10.0, stream=13)


def test_reading_imports_no_torch():
    code = "import sys, auxhead.autotune.doctor.load_trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_annotations_are_requests_and_times_count_from_their_begin(tmp_path):
    trace = requests_of(two_kernels, tmp_path)
    assert trace.cut_by == "the doctor's annotation" and len(trace.requests) == 3 and trace.warm
    assert trace.devices == (H100,) and not trace.has_stacks and trace.watched is None
    [first, second, _] = trace.requests
    assert second.start_us > first.start_us + first.end_us
    for request in (first, second):
        assert [(work.kind, work.stream, work.us) for work in request.work] == [
            ("kernel", 7, pytest.approx(30.0)),
            ("kernel", 13, pytest.approx(10.0)),
        ]
        assert [call.start_us for call in request.calls] == pytest.approx([0.5, 5.5])
        assert request.end_us == pytest.approx(max(work.end_us for work in request.work))
        assert [work.call for work in request.work] == list(request.calls)
        assert request.work[0].grid == (8, 1, 1)


def test_work_belongs_to_the_request_that_launched_it_not_to_where_it_lies(tmp_path):
    program = Program()
    with program.request():
        program.kernel(500.0)
    with program.request():  # begins while the first one's kernel runs
        program.kernel(5.0)
    first, second = read(program.content(), tmp_path).requests
    assert [work.us for work in first.work] == [pytest.approx(500.0)]
    assert [work.us for work in second.work] == [pytest.approx(5.0)]
    assert second.end_us > 490.0


def test_without_annotations_steps_are_requests_but_for_the_first_of_three(tmp_path):
    for steps, wanted in ((2, 2), (3, 2), (5, 4)):
        program = Program()
        for step in range(steps):
            with program.inside("user_annotation", f"ProfilerStep#{step + 4}"):
                program.kernel()
        trace = read(program.content(), tmp_path)
        assert (trace.cut_by, len(trace.requests), trace.warm) == ("ProfilerStep", wanted, True)


def module_calls(program, times, tail=0):
    for _ in range(times):
        with program.function("nn.Module: Net_0"), program.function("nn.Module: Conv2d_0"):
            program.kernel()
        with program.function("nn.Module: Head_0"):
            program.kernel(20.0)
        program.call("cudaDeviceSynchronize", 100.0)
    for _ in range(tail):
        program.call("cudaFree", 500.0)


def test_without_steps_calls_of_the_first_outermost_module_are_requests(tmp_path):
    program = Program()
    module_calls(program, 6, tail=9)
    trace = read(program.content(), tmp_path)
    assert (trace.cut_by, len(trace.requests), trace.warm) == ("calls of Net", 4, True)  # a third were warm-up
    for request in trace.requests:
        assert len(request.work) == 2, "what is called until the next one begins belongs to it"
    assert [call.name for call in trace.requests[-1].calls].count("cudaFree") == 0, "nor what a script does at its end"


def test_a_module_called_once_at_first_does_not_cut(tmp_path):
    program = Program()
    with program.function("nn.Module: Warm_0"):
        program.kernel()
    module_calls(program, 3)
    trace = read(program.content(), tmp_path)
    assert (trace.cut_by, len(trace.requests)) == ("calls of Net", 2)


def test_else_the_whole_trace_is_one_request_and_not_a_warm_one(tmp_path):
    program = Program()
    two_kernels(program)
    two_kernels(program)
    trace = read(program.content(), tmp_path)
    [request] = trace.requests
    assert len(request.work) == 4 and "whole trace" in trace.cut_by and not trace.warm
    assert request.end_us == pytest.approx(max(work.end_us for work in request.work))


def test_a_call_has_the_innermost_operator_function_and_head_around_it_on_its_thread(tmp_path):
    program = Program()
    with program.request():
        with program.function("probe.py(32): forward"), program.function("nn.Module: Linear_0"), program.head("exit1"):
            with program.function("torch/nn/modules/linear.py(130): forward"), program.operator("aten::linear"):
                with program.operator("aten::addmm"):
                    program.kernel()
        program.kernel()
        begin, end = program.now - 20.0, program.now + 20.0
        program.events.append({**event("cpu_op", "aten::elsewhere", begin, end - begin), "tid": 99})
    trace = read(program.content(), tmp_path)
    inner, outer = trace.requests[0].calls
    assert (inner.operator, inner.line, inner.head) == ("aten::addmm", "probe.py:32 in forward", "exit1")
    assert inner.operator_us is not None and inner.operator_us[0] < inner.start_us < inner.end_us < inner.operator_us[1]
    assert (outer.operator, outer.line, outer.head) == (None, None, None)
    assert trace.has_stacks


def test_only_functions_of_the_users_own_are_lines():
    """Where a top level stood when the profiler began tells nothing."""
    for name, wanted in {
        "probe.py(79): <module>": "probe.py in <module>",
        "random.py(79): <module>": "random.py in <module>",
        "my/nets/resnet.py(12): forward": "my/nets/resnet.py:12 in forward",
        "<ipython-input-3-ab>(2): step": "<ipython-input-3-ab>:2 in step",
        "random.py(12): choice": None,
        "<built-in method conv2d of type object at 0x7faae4f3e180>": None,
        "nn.Module: Conv2d_0": None,
    }.items():
        assert profiled_line(name) == wanted, name


def test_a_place_is_part_of_a_sentence():
    for line, words in {
        "steps.py:65": "at steps.py:65",
        "steps.py:57 in forward": "in forward, which begins at steps.py:57",
        "my folder in use/steps.py:57 in forward": "in forward, which begins at my folder in use/steps.py:57",
        "train.py in <module>": "in train.py",
    }.items():
        assert place_in_words(line) == words


def test_waits_graphs_copies_and_versions_of_names(tmp_path):
    def make(program):
        program.kernel()
        program.wait(13, 7)
        program.replay(("a", 7, 5.0), ("b", 21, 5.0))
        program.copy("HtoD (Pageable -> Device)")
        program.work("gpu_memset", "Memset (Device)", 1.0, 7, program.call("cudaMemsetAsync"))
        program.work("kernel", "late", 1.0, 7, program.call("cuLaunchKernelEx_v2", kind="cuda_driver"))

    request = requests_of(make, tmp_path).requests[0]
    assert [wait.stream for wait in request.waits] == [13]
    assert [work.graph for work in request.work].count(True) == 2
    assert {work.kind for work in request.work} == {"kernel", "copy", "fill"}
    assert request.calls[-1].name == "cuLaunchKernelEx"


def test_work_without_its_call_belongs_to_where_it_lies(tmp_path):
    program = Program()
    with program.request():
        program.kernel()
        program.work("kernel", "nobody's", 1.0, 13, 999)
        program.call("cudaEventQuery")
    [request] = read(program.content(), tmp_path).requests
    assert [work.call is None for work in request.work] == [False, True]


def test_what_was_watched_comes_with_it_and_gzip_is_read(tmp_path):
    watched = Watched(requests=3, host_us=70.0, heads=(FusibleHead("exit1"),))
    content = Program()
    content.kernel()
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps(content.content(watched)).encode()))
    assert load_trace(file).watched == watched


def test_what_is_no_event_is_passed_over(tmp_path):
    program = Program()
    program.kernel()
    content = program.content()
    content["traceEvents"] += [
        None,
        7,
        {"ph": "X", "cat": "kernel", "name": "no time"},
        {"ph": "X", "cat": "kernel", "name": "no number", "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": 5, "ts": 1.0, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "never", "ts": float("nan"), "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "after all", "ts": 10**400, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "for ever", "ts": 1.0, "dur": 1e300},
        {"ph": "X", "cat": "kernel", "name": "backwards", "ts": 1004.0, "dur": -1.0},
        {"ph": "X", "cat": ["kernel"], "name": "no category", "ts": 1004.0, "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "no args", "ts": 1004.0, "dur": 1, "args": None},
    ]
    [request] = read(content, tmp_path).requests
    assert [work.name for work in request.work] == ["no args", "void some_kernel(float*)"]


def test_what_is_no_trace_is_said_in_one_line(tmp_path):
    file = tmp_path / "trace.json"
    for content, says in (
        (b"no trace", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", 'no list "traceEvents"'),
        (b'{"traceEvents": 5}', 'no list "traceEvents"'),
        (b'{"traceEvents": []}', "ProfilerActivity.CUDA"),
        (b"\x1f\x8b not gzip", "compressed and cannot be read"),
        (b"\xff\xfe\x00", "is not JSON"),
        (json.dumps(trace_of()).encode(), "ProfilerActivity.CUDA"),  # of a CPU alone
    ):
        file.write_bytes(content)
        with pytest.raises(BadTrace) as caught:
            load_trace(file)
        assert says in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_no_file_and_one_that_unpacks_to_too_much(tmp_path, monkeypatch):
    with pytest.raises(BadTrace, match="cannot be read"):
        load_trace(tmp_path / "none.json")
    file = tmp_path / "big.json.gz"
    file.write_bytes(gzip.compress(b" " * 5000))
    monkeypatch.setattr(reading, "MOST_BYTES", 4999)
    with pytest.raises(BadTrace, match="holds more than 4,999 bytes"):
        load_trace(file)


def test_a_broken_key_of_the_doctors_own_is_said(tmp_path):
    program = Program()
    program.kernel()
    for kept in (5, {}, {"requests": 1, "host_us": 1.0, "streams": 5}, {"requests": 1}):
        with pytest.raises(BadTrace, match="auxheadDoctor"):
            read(program.content() | {"auxheadDoctor": kept}, tmp_path)


def test_a_trace_of_another_vendors_device_is_refused_as_such(tmp_path):
    for category, name in (
        ("cuda_runtime", "hipLaunchKernel"),  # as ROCm's builds have it
        ("hip_runtime", "launch"),
        ("xpu_driver", "zeCommandListAppendLaunchKernel"),
        ("privateuse1_runtime", "launch"),
    ):
        content = trace_with("cuda_runtime", cat=category, name=name)
        told = name if category == "cuda_runtime" else category
        says = rf"is of another vendor's device \('{told}'\); wants a trace of an NVIDIA GPU"
        with pytest.raises(BadTrace, match=says):
            read(content, tmp_path)


def test_a_trace_that_tells_no_streams_is_refused(tmp_path):
    for args in ({}, {"device": 0}, {"stream": "7"}, [7], None):
        with pytest.raises(BadTrace, match="tells no stream of what its GPU ran, wants a trace"):
            read(trace_with("kernel", args=args), tmp_path)


def trace_with(changed, **fields):
    """Two kernels, with other fields in the events of a category."""
    program = Program()
    two_kernels(program)
    content = program.content()
    for one in content["traceEvents"]:
        if one["cat"] == changed:
            one.update(fields)
    return content


def test_every_function_of_a_long_traces_stacks_is_named_once(tmp_path):
    profiled_line.cache_clear()
    program = Program(host_us=1.0)
    with program.request():
        for _ in range(500):  # nested as calls of modules are
            with program.function("probe.py(3): f"), program.function("nn.Module: A_0"), program.operator("aten::b"):
                with program.function("<built-in method b>"), program.function("torch/a.py(1): g"):
                    program.kernel(1.0)
    [request] = read(program.content(), tmp_path).requests
    assert len(request.work) == 500 and profiled_line.cache_info().misses == 4
