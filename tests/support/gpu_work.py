"""What a GPU does for a call, from a trace of torch.profiler; a stream of others, and a stream that is warm."""

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


def new_stream():
    """A stream that PyTorch has not made."""
    from cuda.bindings import runtime

    status, handle = runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, 0)
    assert not status
    return torch.cuda.ExternalStream(int(handle))


def warm_stream():
    """A stream of high priority; what operators need once, as libraries and workspaces, is there on it and this one."""
    stream = torch.cuda.Stream(priority=-1)
    with torch.no_grad():
        for each in (torch.cuda.current_stream(), stream):
            with torch.cuda.stream(each):
                (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
    torch.cuda.synchronize()
    return stream
