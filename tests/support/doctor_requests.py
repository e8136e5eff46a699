"""Requests of hand-made traces that the tests of the doctor's findings begin from: a trunk, and heads beside it."""

from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.trace import StreamUse

from .example_traces import FILLING

TRUNK, SIDE = 7, 21


def kinds(trace):
    return [finding.kind for finding in find_all(trace)]


def trunk(program, count=8, us=40.0, stream=TRUNK, **more):
    for _ in range(count):
        program.kernel(us, stream, **more)


def head(program, name="exit1", stream=SIDE, kernels=3, us=4.0):
    with program.head(name):
        for _ in range(kernels):
            program.kernel(us, stream, "void head_kernel<float>(float*)")


def overlapped(program):
    """Two heads, each forked, hidden behind the next segment, and joined at the end: as it should be."""
    trunk(program, 6)
    for name in ("exit1", "exit2"):
        program.wait(SIDE, TRUNK)
        head(program, name)
        trunk(program, 6)
    program.wait(TRUNK, SIDE)
    trunk(program, 1)


def streams(trunk_priority=-1, side_priority=0, side_operators=3):
    return (
        StreamUse(0x10, 0, trunk_priority, 30, TRUNK),
        StreamUse(0x20, 0, side_priority, side_operators, SIDE),
    )


def grouped(program, stream=150, us=60.0):
    """A convolution as cuDNN runs one whose algorithm has a stream of its own."""
    with program.operator("aten::cudnn_convolution"):
        program.wait(stream, TRUNK)
        program.kernel(us, stream, shape=FILLING)
        program.wait(TRUNK, stream)
