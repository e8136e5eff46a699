"""Requests in a profiler's trace: every number of traces made by hand, and real ones."""

import json

import pytest
import torch
from auxhead.autotune.measuring import profiled_requests
from auxhead.autotune.measuring.cuda_calls import (
    ALLOCATIONS,
    ANNOTATION,
    GRAPH_LAUNCHES,
    LAUNCHES,
    SYNCHRONISATIONS,
)
from auxhead.autotune.measuring.profiled_requests import (
    WARM_UP,
    RequestProfile,
    profile_requests,
    request_profile,
    steady_state_problems,
)
from auxhead.model import EagerRunner, EarlyExitNetwork
from support.example_models import SmallNet, needs_gpu, plain_heads
from support.example_traces import kernel, request, runtime, trace_of, two_unequal_requests


def test_every_number_of_a_trace():
    profile = request_profile(two_unequal_requests())
    assert profile.requests == 2
    assert {row.name: (row.by_request, row.total_us) for row in profile.api} == {
        "cudaLaunchKernel": ((1, 2), 12.0),
        "cuLaunchKernelEx": ((1, 1), 8.0),
        "cudaGraphLaunch": ((1, 1), 24.0),
        "cudaMemcpyAsync": ((1, 0), 3.0),
        "cudaMalloc": ((0, 1), 30.0),
        "cudaStreamSynchronize": ((0, 1), 30.0),
    }
    assert [row.total_us for row in profile.api] == sorted((row.total_us for row in profile.api), reverse=True)
    by_name = {row.name: row for row in profile.api}
    assert by_name["cudaLaunchKernel"].calls == 1.5 and by_name["cudaLaunchKernel"].host_us == 6.0
    assert profile.calls_by_request(LAUNCHES) == (3, 4) and profile.calls_by_request(GRAPH_LAUNCHES) == (1, 1)
    assert (profile.kernels, profile.copies, profile.fills) == (2.5, 0.5, 0.5)
    assert profile.kernel_us == (10 + 8 + 20 + 5 + 7) / 2
    assert profile.busy_us == (14 + 20 + 7) / 2
    assert profile.calls_by_request(ALLOCATIONS) == profile.calls_by_request(SYNCHRONISATIONS) == (0, 1)


def test_a_steady_state_is_told_from_another():
    assert steady_state_problems(request_profile(two_unequal_requests())) == [
        "cudaMalloc allocates or frees: got 1 calls in 1 of 2 requests (first in request 2), wants none.",
        "cudaStreamSynchronize waits for the device: got 1 calls in 1 of 2 requests (first in request 2), wants none.",
        "Launches vary: got 3 to 4 a request, wants the same in each.",
    ]
    steady = [
        call
        for begin in (0.0, 100.0, 200.0)
        for call in (
            request(begin, 50.0),
            runtime("cudaGraphLaunch", begin + 1, 5.0),
            runtime("cudaEventQuery", begin + 7, 1.0),
            runtime("cudaEventRecord", begin + 9, 1.0),
            runtime("cudaStreamWaitEvent", begin + 11, 1.0),
            runtime("cudaMemcpyAsync", begin + 13, 1.0),
            kernel(begin + 20, 5.0),
            runtime("cudaDeviceSynchronize", begin + 60, 9.0),
        )
    ]
    assert steady_state_problems(request_profile(trace_of(*steady))) == []


def test_a_request_without_launches():
    profile = request_profile(trace_of(request(0.0, 10.0)))
    assert profile == RequestProfile(1, (), 0.0, 0.0, 0.0, 0.0, 0.0)
    assert profile.calls_by_request(LAUNCHES) == (0,) and steady_state_problems(profile) == []


def test_a_trace_without_requests_is_refused():
    with pytest.raises(ValueError, match=f"got no event '{ANNOTATION}', wants one for each request"):
        request_profile({"traceEvents": [kernel(0.0, 1.0)]})


def test_a_trace_that_lost_requests_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(profiled_requests, "record_trace", lambda *_: trace_of(request(0.0, 10.0)))
    with pytest.raises(RuntimeError, match="holds 1 of 2 requests; the profiler lost the rest"):
        profile_requests(lambda x: x, torch.ones(1), 2, tmp_path / "trace.json")


def test_requests_are_found_in_a_real_trace(tmp_path):
    calls = []
    linear = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4)
    trace_file = tmp_path / "trace.json"
    trace_file.write_text("an older one")
    profile = profile_requests(lambda x: calls.append(linear(x)), x, 3, trace_file)
    assert profile == RequestProfile(3, (), 0.0, 0.0, 0.0, 0.0, 0.0) and len(calls) == WARM_UP + 3
    events = json.loads(trace_file.read_text())["traceEvents"]
    assert sum(event.get("name") == ANNOTATION for event in events) == 3
    assert sum(event.get("name") == "aten::linear" for event in events) == 3  # and none of the warm-up's
    assert list(tmp_path.iterdir()) == [trace_file]


def small_network():
    network = EarlyExitNetwork(SmallNet(), plain_heads()).cuda().eval()
    x = torch.randn(4, 3, 16, 16, device="cuda")
    network.check_taps(x)
    return network, x


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_the_eager_runner(self, tmp_path):
        network, x = small_network()
        profile = profile_requests(EagerRunner(network), x, 5, tmp_path / "trace.json")
        layers = 3 * 3 + 1
        assert min(profile.calls_by_request(LAUNCHES)) >= layers + 1
        assert not any(profile.calls_by_request(GRAPH_LAUNCHES))
        assert profile.kernels >= layers + 1
        assert 0 < profile.busy_us <= profile.kernel_us
        assert steady_state_problems(profile) == []
        waits = profile_requests(lambda x: EagerRunner(network)(x, stop=True), x, 5, tmp_path / "trace.json")
        assert sum(waits.calls_by_request(SYNCHRONISATIONS)) >= 5
        assert any("waits for the device" in problem for problem in steady_state_problems(waits))

    def test_a_captured_graph(self, tmp_path):
        network, x = small_network()
        runner = EagerRunner(network)
        static = x.clone()
        for _ in range(3):
            runner(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):
            result = runner(static)

        def replay(x):
            static.copy_(x)
            graph.replay()
            return result

        profile = profile_requests(replay, x, 5, tmp_path / "trace.json")
        calls = {row.name: row.by_request for row in profile.api}
        assert calls["cudaGraphLaunch"] == (1,) * 5 == profile.calls_by_request(GRAPH_LAUNCHES)
        assert "cudaMalloc" not in calls and not any(profile.calls_by_request(ALLOCATIONS))
        assert profile.kernels > 10 and sum(profile.calls_by_request(LAUNCHES)) <= 2 * 5
        assert 0 < profile.busy_us <= profile.kernel_us
        assert steady_state_problems(profile) == []
