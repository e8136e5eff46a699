"""Where and when the programs of head launches run, recorded by the kernels themselves while somebody asks for it.

The kernels take a tensor for it, or None, which Triton compiles away: what runs unrecorded is the same machine code as
if there were no such argument.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class Residency(NamedTuple):
    """Where and when the programs of one launch ran, the last time that it did."""

    turns: Tensor
    """[work, 3] int64, a row for each piece of work that a program does: the number of its multiprocessor, start and
    end in nanoseconds of the device's clock (which ticks every 32 on an H200). A program has one piece, or in a launch
    with ``max_programs`` several, one after another. -1 where nothing ran yet; 0 from the interpreter."""
    programs: int
    """Of the launch."""
    num_warps: int
    """Of every program."""


#: Where what is recorded is listed; None: nothing is.
_recorded: ContextVar[list[Residency] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[list[Residency]]:
    """Let head launches made in this thread until the block ends record their programs, each time that they run.

    Yields the list to which each launch adds its :class:`Residency`: an ``ExitLaunch`` at its first call, the operator
    at every one. A replay of a captured launch writes its rows anew. Recording takes a few registers and, at a
    program's end, a store, so that times are not to be taken from what is recorded.
    """
    launches: list[Residency] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def is_recording() -> bool:
    """Whether launches that are made now in this thread record their programs."""
    return _recorded.get() is not None


def new_turns(work: int, programs: int, num_warps: int, device: torch.device) -> Tensor | None:
    """Return and list the memory that a launch with so much work writes; None if nothing is recorded."""
    launches = _recorded.get()
    if launches is None:
        return None
    launches.append(Residency(torch.full((work, 3), -1, dtype=torch.int64, device=device), programs, num_warps))
    return launches[-1].turns
