"""Names in traces: annotations of requests, heads and streams, and calls of the CUDA API by what they do. No torch."""

import re

#: Names of the kernel that decides for heads, and of the one that packs features of some before.
HEAD_KERNEL, PACK_KERNEL = "exit_kernel", "pack_kernel"
#: Before the name of a head that runs.
HEAD = "auxhead head "
#: Before the device and the handle of the stream on which a kernel is launched.
STREAM = "auxhead stream "
#: Marks a request in the trace.
ANNOTATION = "auxhead request"

GRAPH_LAUNCHES = frozenset({"cudaGraphLaunch", "cuGraphLaunch"})
KERNEL_LAUNCHES = frozenset(
    {
        *("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel"),
        *("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"),
    }
)
#: Calls that launch a kernel or a graph.
LAUNCHES = KERNEL_LAUNCHES | GRAPH_LAUNCHES
#: Calls that take memory from the driver or give it back; most of them wait for the device too.
ALLOCATIONS = frozenset(
    {
        *("cudaMalloc", "cudaMallocAsync", "cudaMallocFromPoolAsync", "cudaMallocHost", "cudaMallocManaged"),
        *("cudaHostAlloc", "cudaHostRegister", "cudaHostUnregister", "cudaFree", "cudaFreeAsync", "cudaFreeHost"),
        *("cuMemAlloc", "cuMemAllocAsync", "cuMemAllocHost", "cuMemHostAlloc", "cuMemFree", "cuMemFreeAsync"),
        *("cuMemFreeHost", "cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap"),
    }
)
#: Of these, what a pool of the driver serves: in a steady state a matter of a microsecond, and nothing waits.
POOLED_ALLOCATIONS = frozenset({name for name in ALLOCATIONS if name.endswith("Async")})
#: Calls in which the host waits for the device.
SYNCHRONISATIONS = frozenset(
    {
        *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
        *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"),
    }
)
#: Calls that record an event.
EVENT_RECORDS = frozenset({"cudaEventRecord", "cudaEventRecordWithFlags", "cuEventRecord", "cuEventRecordWithFlags"})
#: Begins of a capture.
CAPTURE_BEGINS = frozenset({"cudaStreamBeginCapture", "cuStreamBeginCapture", "cudaStreamBeginCaptureToGraph"})
#: Calls that make a graph fit to be launched, or change one that is.
INSTANTIATIONS = frozenset(
    {
        *("cudaGraphInstantiate", "cudaGraphInstantiateWithFlags", "cudaGraphInstantiateWithParams"),
        *("cuGraphInstantiate", "cuGraphInstantiateWithFlags", "cuGraphInstantiateWithParams"),
        *("cudaGraphExecUpdate", "cuGraphExecUpdate"),
    }
)
#: Names of copies and fills that are not asynchronous, in each of their many forms: cudaMemcpy2D, cuMemsetD8.
_SYNCHRONOUS_COPIES = re.compile(r"cu(da)?Mem(cpy|set)(?!\w*Async)\w*")


def is_synchronous_copy(name: str) -> bool:
    """Return whether a call copies or fills and is none of those that end in Async."""
    return _SYNCHRONOUS_COPIES.fullmatch(name) is not None


def plain_name(name: str) -> str:
    """Return the name of a call without the version that CUPTI may add: cudaLaunchKernel_v7000, cuMemAlloc_v2."""
    return name.partition("_")[0]
