"""``Program``: a factory, with what the doctor has to find in what it makes, and what else it may."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: Findings of a program's layout and types, and of other work on the host, which programs about streams may all have.
BESIDE = frozenset({"layout-transposes", "dtype-casts", "tf32-off", "jitter", "garbage-collection", "code-loading"})
#: What a factory returns: something to call, and its input.
Made = tuple[Callable[[Any], Any], Any]


@dataclass(frozen=True)
class Program:
    """A program and its findings; the correct ones have none, and may have none."""

    make: Callable[[], Made]
    finds: frozenset[str] = frozenset()
    """Kinds of findings that it is there for."""
    may_find: frozenset[str] = frozenset()
    """Kinds that the fault brings along."""
    needs_cuda: bool = True
    """Whether it can only be made where there is a GPU."""
    devices: int = 1
    """How many GPUs it takes."""
    alone: bool = False
    """Whether it takes a process in which nothing was profiled before."""


def planted(make: Callable[[], Made], *finds: str, may_find: tuple[str, ...] = (), **needs: Any) -> Program:
    """A program with a fault; where the host is slow enough, launches bound any that is not a graph."""
    return Program(make, frozenset(finds), frozenset({*may_find, "launch-bound"}), **needs)


def device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
