"""Calls of the CUDA API by what they do, as traces name them, and the mark of a request; no torch."""

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
#: Calls in which the host waits for the device.
SYNCHRONISATIONS = frozenset(
    {
        *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
        *("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"),
    }
)
