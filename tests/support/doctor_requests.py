"""Requests of hand-made traces that the tests of the doctor's findings begin from, as steps in words."""

from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.trace import StreamUse

from .example_traces import FILLING, SMALL, Program, read, requests_of

TRUNK, SIDE = 7, 21
#: Two heads, each forked, hidden behind the next segment, and joined at the end: as it should be.
OVERLAPPED = "trunk 6; fork; head exit1; trunk 6; fork; head exit2; trunk 6; join; trunk 1"


def run(program, steps):
    """Run steps, each of some words, "; " between them; times are microseconds."""
    for step in steps.split("; "):
        match step.split():
            case ["trunk", count, *more]:  # "trunk 9", "trunk 9 of 200", "trunk 9 filling"
                us, shape = float(more[1]) if "of" in more else 40.0, FILLING if "filling" in more else SMALL
                for _ in range(int(count)):
                    program.kernel(us, TRUNK, shape=shape)
            case ["side", us, *late]:  # "side 20", "side 20 behind the trunk"
                program.kernel(float(us), SIDE, after=program.free[TRUNK] if late else 0.0)
            case ["head", name, *line]:  # "head exit1", "head exit1 in line"
                with program.head(name):
                    for _ in range(3):
                        program.kernel(4.0, TRUNK if line else SIDE, "void head_kernel<float>(float*)")
            case ["fork"]:
                program.wait(SIDE, TRUNK)
            case ["join"]:
                program.wait(TRUNK, SIDE)
            case ["item", file, function]:  # "item net.py(32): forward"
                program.item(f"{file} {function}")
            case ["await", "device", *us]:
                program.call("cudaDeviceSynchronize", float(us[0])) if us else program.synchronise(
                    "cudaDeviceSynchronize"
                )
            case ["call", name, us]:
                program.call(name, float(us))
            case ["copy", way, memory, *side]:  # "copy HtoD Pinned side": up from there; DtoH is down to there
                there = f"{memory} -> Device" if way == "HtoD" else f"Device -> {memory}"
                host_us = 100.0 if memory == "Pageable" else 5.0
                with program.function("loop.py(9): step"), program.operator("aten::copy_"):
                    program.copy(f"{way} ({there})", 90.0, SIDE if "side" in side else TRUNK, host_us)
                    if memory == "Pageable" and side != ["unawaited"]:
                        program.synchronise()
            case ["graph", *kernels]:  # "graph conv:7:30 exit_kernel:7:6": names, streams, times
                parts = [kernel.split(":") for kernel in kernels]
                program.replay(*((name, int(stream), float(us)) for name, stream, us in parts))
            case ["convolution", trials]:
                convolution(program, int(trials))
            case ["capture"]:
                capture(program)
            case ["python", us]:
                program.now += float(us)
            case _:
                raise AssertionError(step)


def convolution(program, trials):
    """As cuDNN runs one, whose algorithms it tries so many times before."""
    with program.function("net.py(3): forward"), program.operator("aten::cudnn_convolution"):
        for _ in range(trials):
            run(program, "call cudaDeviceSynchronize 10; call cudaEventRecord 3")
            program.kernel(7.0)
            program.call("cudaEventRecord", 3.0)
            program.synchronise("cudaEventSynchronize")
        program.kernel(40.0)


def capture(program):
    """As torch.cuda.graph does: it waits and gives memory back first, and takes some while it captures."""
    run(program, "call cudaDeviceSynchronize 20; call cudaFree 100")
    program.kernel(1.0, stream=25)
    with program.function("net.py(7): run"):
        run(
            program, "call cudaStreamBeginCapture 3; call cudaMalloc 100; call cudaLaunchKernel 5"
        )  # which runs nothing
        run(program, "call cudaStreamEndCapture 2; call cudaGraphInstantiateWithFlags 35")


def grouped(program, us=60.0):
    """A convolution as cuDNN runs one whose algorithm has a stream of its own."""
    with program.operator("aten::cudnn_convolution"):
        program.wait(150, TRUNK)
        program.kernel(us, 150, shape=FILLING)
        program.wait(TRUNK, 150)


def trace_of(make, folder, **more):
    """A trace of three requests, of steps or of a function of a program."""
    return requests_of(make if callable(make) else lambda program: run(program, make), folder, **more)


def of_requests(folder, *requests, watched=None, before=""):
    """A trace of different requests, each of some steps; others may come before them."""
    program = Program()
    if before:
        run(program, before)
    for steps in requests:
        with program.request():
            run(program, steps)
        program.rest()
    return read(program.content(watched), folder)


def kinds(trace):
    return [finding.kind for finding in find_all(trace)]


def streams(trunk_priority=-1, side_priority=0, side_operators=3):
    return (
        StreamUse(0x10, 0, trunk_priority, 30, TRUNK),
        StreamUse(0x20, 0, side_priority, side_operators, SIDE),
    )
