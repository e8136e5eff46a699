"""Script: one launch with a fault that a tool of compute-sanitizer has to find: ``python planted.py TOOL``.

Triton puts barriers where they belong, so that a barrier's fault is CUDA's own, compiled by NVRTC.
"""

import sys

import torch
import triton
import triton.language as tl

#: 16 threads of a warp wait for the others, which do not come.
SOURCE = """
extern "C" __global__ void waits_for_half_a_warp(int *out) {
    if (threadIdx.x < 16) __syncthreads();
    out[threadIdx.x] = threadIdx.x;
}
"""


@triton.jit
def writes_past_the_end(out, N, BLOCK: tl.constexpr):
    off = tl.arange(0, BLOCK)
    tl.store(out + off, off, mask=off <= N)


@triton.jit
def reads_what_nobody_wrote(x, out, N, BLOCK: tl.constexpr):
    off = tl.arange(0, BLOCK)
    tl.store(out + off, tl.load(x + off, mask=off < N), mask=off < N)


def launch_cuda(name: str, threads: int) -> None:
    """Launch a kernel of ``SOURCE`` on as many int32 numbers as it has threads."""
    import ctypes

    from cuda.bindings import driver, nvrtc

    def done(returned: tuple) -> object:
        assert int(returned[0]) == 0, returned
        return returned[1] if len(returned) > 1 else None

    out = torch.zeros(threads, dtype=torch.int32, device="cuda")
    major, minor = torch.cuda.get_device_capability()
    program = done(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"planted.cu", 0, [], []))
    done(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    code = b" " * done(nvrtc.nvrtcGetCUBINSize(program))
    done(nvrtc.nvrtcGetCUBIN(program, code))
    function = done(driver.cuModuleGetFunction(done(driver.cuModuleLoadData(code)), name.encode()))
    stream = torch.cuda.current_stream().cuda_stream
    arguments = ((out.data_ptr(),), (ctypes.c_void_p,))
    done(driver.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, arguments, 0))


def main() -> None:
    """Launch the fault of a tool."""
    tool = sys.argv[1]
    if tool == "memcheck":  # PyTorch's cache would hand out 4,096 bytes for these 4,000
        writes_past_the_end[(1,)](torch.zeros(1000, dtype=torch.int32, device="cuda"), 1000, BLOCK=1024)
    elif tool == "initcheck":
        x, out = (torch.empty(1000, dtype=torch.int32, device="cuda") for _ in range(2))
        reads_what_nobody_wrote[(1,)](x, out, 1000, BLOCK=1024)
    else:
        launch_cuda("waits_for_half_a_warp", 32)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
