"""Hand-made Chrome traces in the format of torch.profiler."""

import dataclasses
import json
from contextlib import contextmanager

from auxhead.autotune.doctor.load_trace import load_trace
from auxhead.autotune.doctor.trace import KEY
from auxhead.autotune.measuring.cuda_calls import ANNOTATION


def event(kind, name, begin, duration, **args):
    return {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": duration, "args": args}


def request(begin, duration):
    return event("user_annotation", ANNOTATION, begin, duration)


def runtime(name, begin, duration):
    return event("cuda_runtime", name, begin, duration)


def driver(name, begin, duration):
    return event("cuda_driver", name, begin, duration)


def kernel(begin, duration, stream=7):
    return event("kernel", "void some_kernel(float*)", begin, duration, device=0, stream=stream)


def replay(launch, begin, *kernels):
    """A launch of a graph and its kernels: (name, when it begins, in which stream, how long), times after ``begin``."""
    graph = event("cuda_runtime", "cudaGraphLaunch", begin - 9.0, 5.0, correlation=launch)
    shape = {"grid": [12, 1, 1], "block": [128, 1, 1], "registers per thread": 40, "correlation": launch}
    return [
        graph,
        *(event("kernel", name, begin + at, us, stream=stream, **shape) for name, at, stream, us in kernels),
    ]


def trace_of(*events):
    """With what else stands in a trace: names of threads, operators, the profiler's own step."""
    others = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "i", "cat": "cuda_runtime", "name": "cudaMalloc", "s": "t", "ts": 101.0, "pid": 1, "tid": 1},
        event("user_annotation", "ProfilerStep#1", 0.0, 1e6),
        event("gpu_user_annotation", ANNOTATION, 110.0, 50.0),
        event("cpu_op", "aten::conv2d", 100.0, 10.0),
    ]
    return {"schemaVersion": 1, "traceEvents": [*others, *events]}


def two_unequal_requests():
    """The first replays a graph and launches two kernels; the second launches one more, and takes memory."""
    return trace_of(
        # given out of order, as the profiler does
        request(1000.0, 100.0),
        request(100.0, 50.0),
        # the first request
        runtime("cudaLaunchKernel", 101.0, 4.0),
        driver("cuLaunchKernelEx", 110.0, 6.0),
        runtime("cudaGraphLaunch", 120.0, 10.0),
        runtime("cudaMemcpyAsync", 140.0, 3.0),
        kernel(106.0, 10.0),
        kernel(112.0, 8.0, stream=13),  # 4 beside the one before
        kernel(130.0, 20.0),
        kernel(135.0, 5.0, stream=13),  # all of it beside the one before
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 160.0, 2.0),
        # the caller's own wait, between the requests
        runtime("cudaDeviceSynchronize", 155.0, 40.0),
        # the second request
        runtime("cudaLaunchKernel_v7000", 1001.0, 4.0),
        runtime("cudaLaunchKernel", 1010.0, 4.0),
        driver("cuLaunchKernelEx", 1020.0, 2.0),
        runtime("cudaGraphLaunch", 1030.0, 14.0),
        runtime("cudaMalloc", 1050.0, 30.0),
        runtime("cudaStreamSynchronize", 1099.0, 30.0),  # begins in it, ends after it
        kernel(1110.0, 7.0),  # when the call has returned
        event("gpu_memset", "Memset (Device)", 1120.0, 1.0),
    )


# What the doctor reads: a request is a program, with what the host calls and what the device then runs.

H100 = {
    "id": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "computeMajor": 9,
    "numSms": 132,
    "maxThreadsPerMultiprocessor": 2048,
    "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 233472,
    "warpSize": 32,
}
FILLING = {"grid": [4096, 1, 1], "block": [256, 1, 1], "registers per thread": 32, "shared memory": 0}
SMALL = {"grid": [8, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 0}


class Program:
    """One request after another, made call by call; the host's time goes on with each."""

    def __init__(self, thread=1, host_us=5.0):
        self.events = []
        self.now = 1000.0
        self.host_us = host_us
        self.thread = thread
        self.free = {}  # by stream, when its last work ends
        self.correlation = 0

    def frame(self, kind, name, begin, end):
        self.events.append({**event(kind, name, begin, end - begin), "tid": self.thread})

    @contextmanager
    def inside(self, kind, name):
        begin = self.now
        self.now += 0.5
        yield
        self.now += 0.5
        self.frame(kind, name, begin, self.now)

    def request(self):
        return self.inside("user_annotation", ANNOTATION)

    def operator(self, name):
        return self.inside("cpu_op", name)

    def function(self, name):
        return self.inside("python_function", name)

    def head(self, name):
        return self.inside("user_annotation", f"auxhead head {name}")

    def call(self, name, us=None, kind="cuda_runtime"):
        self.correlation += 1
        us = self.host_us if us is None else us
        made = event(kind, name, self.now, us, correlation=self.correlation)
        self.events.append({**made, "tid": self.thread})
        self.now += us
        return self.correlation

    def work(self, kind, name, us, stream, correlation, after=0.0, **args):
        start = max(self.now + 1.0, self.free.get(stream, 0.0), after)
        self.free[stream] = start + us
        args = {"device": 0, "stream": stream, "correlation": correlation, **args}
        self.events.append(event(kind, name, start, us, **args))
        return start + us

    def kernel(self, us=10.0, stream=7, name="void some_kernel(float*)", after=0.0, shape=None, **args):
        """Returns when it ends; ``after``: when what it waits for ends."""
        correlation = self.call("cudaLaunchKernel")
        return self.work("kernel", name, us, stream, correlation, after, **(shape or SMALL), **args)

    def copy(self, way, us=2.0, stream=7, host_us=None):
        correlation = self.call("cudaMemcpyAsync", host_us)
        return self.work("gpu_memcpy", f"Memcpy {way}", us, stream, correlation)

    def replay(self, *kernels):
        """A graph's kernels: (name, stream, how long), each stream one after the other."""
        correlation = self.call("cudaGraphLaunch")
        for name, stream, us in kernels:
            self.work("kernel", name, us, stream, correlation, **SMALL)

    def synchronise(self, name="cudaStreamSynchronize"):
        """The host waits until the default stream is done."""
        end = max(self.now + 2.0, self.free.get(7, 0.0) + 2.0)
        self.call(name, end - self.now)

    def item(self, line="probe.py(32): forward"):
        with self.function(line), self.operator("aten::_local_scalar_dense"):
            self.copy("DtoH (Device -> Pinned)")
            self.synchronise()

    def wait(self, stream, for_stream):
        """Let a stream wait for another, as ``wait_stream`` does; returns when what it waits for is done."""
        self.call("cudaEventRecordWithFlags", 1.0)
        begin = self.now
        correlation = self.call("cudaStreamWaitEvent", 1.0)
        args = {"stream": stream, "wait_on_stream": -1, "correlation": correlation}
        self.events.append(event("cuda_sync", "Stream Wait Event", begin, 1.0, **args))
        done = self.free.get(for_stream, 0.0)
        self.free[stream] = max(self.free.get(stream, 0.0), done)

    def rest(self):
        """Until the device is done, between requests."""
        self.now = max([self.now, *self.free.values()]) + 50.0

    def content(self, watched=None):
        kept = {} if watched is None else {KEY: dataclasses.asdict(watched)}
        return {**trace_of(), "traceEvents": self.events, "deviceProperties": [H100], **kept}


def written(content, folder):
    """The file of a trace."""
    file = folder / "trace.json"
    file.write_text(json.dumps(content))
    return file


def read(content, folder):
    """A trace, as the doctor reads it from a file."""
    return load_trace(written(content, folder))


def requests_of(make, folder, times=3, watched=None):
    """A trace of several requests, each made by ``make(program)``."""
    program = Program()
    for _ in range(times):
        with program.request():
            make(program)
        program.rest()
    return read(program.content(watched), folder)
