"""The user's own lines, of a profiler's events and of stacks; and errors of the user's code, told with their place."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

from ...model.basics.bad_input import BadInput
from ...model.basics.whose_code import Owner, frames_from, line_of, owner, owner_of

_FUNCTION = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")
#: What calls the methods of streams and events for their user: ``wait_event`` calls ``event.wait``.
_STREAMS = str(Path("torch", "cuda", "streams.py"))


@cache
def profiled_line(name: str) -> str | None:
    """Return ``file.py:12 in forward`` for a function of the user's own, by its event's name; None for any other's.

    Names are ``file.py(12): forward``, and 12 is where that function begins. Of code that ran before the profiler
    began, mostly a script's top level, it is where it stood then, and so is left out: ``script.py in <module>``.
    """
    match = _FUNCTION.fullmatch(name)
    if match is None or owner(match["file"], match["function"]) is not Owner.USER:
        return None
    line = "" if match["function"] == "<module>" else f":{match['line']}"
    return f"{match['file']}{line} in {match['function']}"


def place_in_words(line: str) -> str:
    """Return a finding's line as part of a sentence: ``at a.py:65``; ``in forward, which begins at a.py:57``."""
    place, _, function = line.rpartition(" in ")
    if not place:
        return f"at {line}"
    return f"in {place}" if function == "<module>" else f"in {function}, which begins at {place}"


def innermost_line(frame: FrameType | None, outermost: FrameType | None = None) -> str | None:
    """Return the innermost line of a stack that is the user's own, or else another package's or a model's of auxhead.

    The look-up ends with the frame ``outermost``. None: there is only torch, autotune and the standard library.
    """
    other = None
    for each, whose in frames_from(frame, outermost):
        if whose is Owner.USER:
            return line_of(each)
        if other is None and whose in (Owner.PACKAGE, Owner.AUXHEAD):
            other = each
    return None if other is None else line_of(other)


def calling_line(frame: FrameType | None) -> str | None:
    """Return the line that calls a method of a stream or an event, if the user's own code or a package does so itself.

    None: torch or auxhead calls it.
    """
    for each, whose in frames_from(frame):
        if whose is not Owner.STANDARD and not each.f_code.co_filename.endswith(_STREAMS):
            return line_of(each) if whose in (Owner.USER, Owner.PACKAGE) else None
    return None


class UserCodeError(BadInput):
    """An error that the user's code raised."""

    shown: str
    """The traceback, as Python prints it, from the user's first frame on; "" for an exit."""

    def __init__(self, message: str, shown: str) -> None:
        super().__init__(message)
        self.shown = shown


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Raise whatever the user's code raises, exits included, as a :class:`UserCodeError`.

    Args:
        what: raised it, in words; begins with the name of the argument.

    Raises:
        UserCodeError: see there.
        BadInput: as it is, if none of the user's code raised it.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = [(owner_of(frame), frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        users = [(Path(frame.f_code.co_filename).name, line) for whose, frame, line in frames if whose is Owner.USER]
        if isinstance(error, BadInput) and not users:
            raise
        if isinstance(error, SyntaxError) and error.filename is not None and Path(error.filename).is_file():
            users.append((Path(error.filename).name, error.lineno or 0))
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        said = ": ".join((type(error).__name__, *reason.splitlines()[:1]))
        at = f" ({users[-1][0]}:{users[-1][1]})" if users else ""
        shown = "" if isinstance(error, SystemExit) else _from_first_frame(error, [whose for whose, *_ in frames])
        raise UserCodeError(f"{what} raised {said}{at}", shown) from None


def _from_first_frame(error: BaseException, owners: list[Owner]) -> str:
    """Return the traceback from the user's first frame on, or else from that of the first package that was called."""
    first = (Owner.USER,) if Owner.USER in owners else (Owner.PACKAGE, Owner.TORCH)
    rest = error.__traceback__
    for whose in owners:
        if rest is None or whose in first:
            break
        rest = rest.tb_next
    return "".join(traceback.format_exception(type(error), error, rest))
