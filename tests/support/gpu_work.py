"""Kernels, copies and memsets of a call, from a trace of torch.profiler."""

import json

import torch
from torch.profiler import ProfilerActivity, profile


def work_on_the_gpu(call, directory):
    """Names of everything the GPU does for ``call``: kernels, copies and fills."""
    for _ in range(3):  # compile, load, fill the caching allocator
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        kept = call()
        torch.cuda.synchronize()
    del kept
    path = directory / "trace.json"
    trace.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
