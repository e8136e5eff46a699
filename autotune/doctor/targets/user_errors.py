"""Errors of the user's own code: told in one line with their place, behind a traceback from the user's first frame."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ....model.basics.bad_input import BadInput
from ..sources import Owner, owner


class UserCodeError(BadInput):
    """An error that the user's code raised."""

    shown: str
    """The traceback, as Python prints it; "" for an exit."""

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
        frames = list(traceback.walk_tb(error.__traceback__))
        users = [
            (frame.f_code.co_filename, line)
            for frame, line in frames
            if owner(_absolute(frame.f_code.co_filename)) is Owner.USER
        ]
        if isinstance(error, BadInput) and not users:
            raise
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        said = ": ".join((type(error).__name__, *reason.splitlines()[:1]))
        message = f"{what} raised {said}{_place(error, users)}"
        shown = "" if isinstance(error, SystemExit) else _from_first_frame(error)
        raise UserCodeError(message, shown) from None


def _absolute(file: str) -> str:
    """Return the path of a script that was named by a relative one."""
    return file if file.startswith("<") else str(Path(file).absolute())


def _place(error: BaseException, users: list[tuple[str, int]]) -> str:
    """Return the user's innermost line, or that of a source which cannot be parsed, as `` (file.py:2)``."""
    if isinstance(error, SyntaxError) and error.filename is not None and Path(error.filename).is_file():
        return f" ({Path(error.filename).name}:{error.lineno})"
    return f" ({Path(users[-1][0]).name}:{users[-1][1]})" if users else ""


def _from_first_frame(error: BaseException) -> str:
    """Return the traceback from the user's first frame on, or else from that of the first package that was called."""
    from_users = from_others = None
    rest = error.__traceback__
    while rest is not None and from_users is None:
        whose = owner(_absolute(rest.tb_frame.f_code.co_filename))
        if whose is Owner.USER:
            from_users = rest
        elif from_others is None and whose in (Owner.PACKAGE, Owner.TORCH):
            from_others = rest
        rest = rest.tb_next
    return "".join(traceback.format_exception(type(error), error, from_users or from_others))
