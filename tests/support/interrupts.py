"""Interrupts a call at each line of the package that it runs, one line a time."""

import ast
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import auxhead.model

PACKAGES = Path(auxhead.model.__file__).parents[1]
Line = tuple[str, int]


class Interrupt(KeyboardInterrupt):
    """What Ctrl-C raises, and nothing else does."""


def lines_of(call: Callable[[], object], *folders: str) -> list[Line]:
    """Return the lines of some folders of the package that a call runs, each once, in the order of their first time."""
    lines: dict[Line, None] = {}
    _traced(call, lambda line: lines.setdefault(line), folders)
    return list(lines)


def interrupted_at(line: Line, call: Callable[[], object], *folders: str) -> bool:
    """Call, with an interrupt as a line begins for the first time; return whether it came out of the call."""

    def interrupt(at: Line) -> None:
        if at == line:
            sys.settrace(None)
            raise Interrupt

    try:
        _traced(call, interrupt, folders)
    except Interrupt:
        return True
    return False


def _traced(call: Callable[[], object], at_line: Callable[[Line], object], folders: tuple[str, ...]) -> None:
    roots = tuple(str(PACKAGES / folder) for folder in folders)

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        # out of __del__ nothing comes: Python tells of it and goes on
        if not frame.f_code.co_filename.startswith(roots) or frame.f_code.co_name == "__del__":
            return None
        return _LinesOf(at_line) if event == "call" else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


class _LinesOf:
    """The trace of one frame.

    Where Python lets no signal in, none is simulated: as a ``with`` ends, for which it comes back to its first line,
    and at a ``try``, where nothing is done.
    """

    def __init__(self, at_line: Callable[[Line], object]) -> None:
        self._at_line = at_line
        self._seen: set[int] = set()

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> "_LinesOf":
        number = frame.f_lineno
        if event == "line":
            tries, withs = _closed(frame.f_code.co_filename)
            if number not in tries and not (number in withs and number in self._seen):
                self._seen.add(number)
                self._at_line((frame.f_code.co_filename, number))
        return self


@cache
def _closed(file: str) -> tuple[set[int], set[int]]:
    """Return the lines of a file on which a ``try`` stands, and those of the beginnings of a ``with``."""
    tries, withs = set(), set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.Try):
            tries.add(node.lineno)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            withs |= set(range(node.lineno, node.body[0].lineno))
    return tries, withs
