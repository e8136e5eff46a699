"""Residency: on which multiprocessor, and when, the programs of head launches ran; recorded by the kernels on request.

The kernels take a tensor for it, or None, which Triton compiles away: unrecorded, they are the same machine code as
without such an argument.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class Residency(NamedTuple):
    """Multiprocessor and times of each program of one launch, the last time that it ran."""

    turns: Tensor
    """[work, 3] int64, a row for each piece of work: number of the multiprocessor, start and end in nanoseconds of the
    device's clock (which ticks every 32 on an H200). A program does one piece, or several one after another in a launch
    with ``max_programs``. -1 where nothing ran yet; 0 from the interpreter."""
    programs: int
    num_warps: int


#: Launches recorded in this context so far; None: none is recorded.
_recorded: ContextVar[list[Residency] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[list[Residency]]:
    """Record the programs of head launches that are made in this thread until the block ends, whenever they run.

    Yields the list to which each launch adds its :class:`Residency`: an ``ExitLaunch`` at its first call, the operator
    at every one. A replay of a captured launch overwrites its rows. Recording takes a few registers and a store at a
    program's end: a network's time is not to be taken while it records.
    """
    launches: list[Residency] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def is_recording() -> bool:
    """Return whether launches that are made now in this thread record their programs."""
    return _recorded.get() is not None


def new_turns(work: int, programs: int, num_warps: int, device: torch.device) -> Tensor | None:
    """Allocate and list ``Residency.turns`` of a launch that is being made, ``work`` rows; None if none is recorded."""
    launches = _recorded.get()
    if launches is None:
        return None
    launches.append(Residency(torch.full((work, 3), -1, dtype=torch.int64, device=device), programs, num_warps))
    return launches[-1].turns
