"""Exit patterns that options choose, by names or globs; no torch."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ...model.bad_input import BadInput
from .cells import Cell


def chosen_patterns(cell: Cell, wanted: Sequence[str]) -> list[str]:
    """Return the exit patterns asked for that the cell has."""
    return [name for name in cell.patterns if not wanted or any(fnmatchcase(name, glob) for glob in wanted)]


def check_patterns(wanted: Sequence[str], cells: Sequence[Cell]) -> None:
    """Refuse a glob that fits no exit pattern, with ``BadInput``."""
    check_globs("--exits", wanted, (name for cell in cells for name in cell.patterns))


def check_globs(option: str, wanted: Sequence[str], names: Iterable[str]) -> None:
    """Refuse a glob that fits none of the names, with ``BadInput``."""
    names = list(dict.fromkeys(names))
    for glob in wanted:
        if not any(fnmatchcase(name, glob) for name in names):
            raise BadInput(f"{option}: got {glob}, wants names or globs of: {', '.join(names)}")
