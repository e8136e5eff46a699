"""Hand-made Chrome traces in the format of torch.profiler."""

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
