"""``RUNNERS``: the runners by name, one table that ``make_runner``, plans, candidates and commands read.

It imports no runner before one is asked for, so that commands can show its names at once.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple


class RunnerKind(NamedTuple):
    """A kind of runner."""

    module: str
    """File in this folder that has the class."""
    class_name: str
    graphs: bool = True
    """Whether it replays CUDA graphs: it then derives from ``GraphRunner``, needs a GPU, and "auto" measures it, too;
    else from ``EagerRunner``, and runs on any device."""
    stops: bool = False
    """Whether it is made to run less where samples leave early: "auto" measures it only where the example's do."""

    def imported_class(self) -> Any:
        """Return the class."""
        return getattr(import_module(f".{self.module}", __package__), self.class_name)


#: By the name that ``make_runner(exits=...)`` takes; those of graphs from the simplest on.
RUNNERS: Mapping[str, RunnerKind] = {
    "eager": RunnerKind("runner", "EagerRunner", graphs=False),
    "overlapped": RunnerKind("overlapped", "OverlappedRunner"),
    "polled": RunnerKind("polled", "PolledRunner", stops=True),
    "gated": RunnerKind("gated", "GatedRunner", stops=True),
}
#: The option of "polled" that gathers what stays open into smaller batches.
COMPACTING = RunnerKind("compacting", "CompactingRunner", stops=True)
#: Names that ``make_runner`` takes: "auto" chooses among the runners of graphs.
EXITS = ("auto", *RUNNERS)


def kind_of_runner(exits: str, *, compact: bool = False) -> RunnerKind:
    """Return the row of a name, or that of what gathers samples."""
    return COMPACTING if compact else RUNNERS[exits]
