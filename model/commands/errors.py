"""Errors of commands, one line on stderr and status 2; groups of subcommands, with ``--version`` and ``--report``."""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..basics.bad_input import BadInput
from ..basics.machine import report as machine_report
from .console import escaped


@contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Print ``BadInput``, the given kinds of errors and those of files as one line, and leave with status 2.

    Others of what :func:`call_users` has called are printed from the user's first line on, with status 1.
    """
    printed: tuple[type[Exception], ...] = (BadInput, *kinds)
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # while it can still be told that nothing more fits there
    except printed as error:
        message = str(error)
    except BrokenPipeError:  # whoever read the output has seen enough: no error of ours, click ends quietly
        raise
    except OSError as error:  # no space, no permission
        is_full = _drops_output() or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # files have names
        message = f"{error.filename or ('standard output' if is_full else 'file')}: {error.strerror or error}"
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code is not call_users.__code__:
            frames = frames.tb_next
        if frames is None:
            raise
        frames = frames.tb_next
        while frames is not None and frames.tb_next is not None and "importlib" in frames.tb_frame.f_code.co_filename:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        raise typer.Exit(1) from None
    else:
        return
    print(f"Error: {escaped(message)}", file=sys.stderr)
    raise typer.Exit(2)


@contextmanager
def by_option(*names: str) -> Iterator[None]:
    """Let a ``ValueError`` that names an argument of a function of ours name the option that it comes from.

    ``names`` are those of the arguments: ``max_work`` is ``--max-work``.
    """
    try:
        yield
    except ValueError as error:
        blamed, colon, rest = str(error).partition(":")
        if not set(blamed.split(", ")) <= {*names}:
            raise
        for name in names:
            blamed = blamed.replace(name, "--" + name.replace("_", "-"))
            rest = rest.replace(name, "--" + name.replace("_", "-")) if "_" in name else rest
        raise BadInput(blamed + colon + rest) from None


def call_users(function: Callable[[], Any]) -> Any:
    """Call a function of the user's; :func:`one_line_errors` knows it by this frame."""
    return function()


def _drops_output() -> bool:
    """Return whether standard output takes nothing more; what is left is dropped, or Python would fail at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return True
    return False


class Subcommands(TyperGroup):
    """A group of subcommands that take no empty arguments: an empty path would be the current folder."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the subcommand and its arguments, if none of these is empty."""
        name, command, own = super().resolve_command(ctx, args)
        checked = own
        if command is not None and "allow_interspersed_args" in command.context_settings and "run" in own:
            checked = own[: own.index("run")]  # what follows is a script's
        with one_line_errors():
            for before, one in zip([str(name), *checked], checked, strict=False):
                if not one or one.startswith("--") and one.endswith("="):
                    where = one.rstrip("=") or (before if before.startswith("--") else "argument")
                    raise BadInput(f"{where}: got an empty text, wants a value; '.' is the current folder")
        return name, command, own


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"auxhead {version('auxhead')}")
        raise typer.Exit


def _print_report(wanted: bool) -> None:
    if wanted:
        print(escaped(machine_report(), but="\n"))
        raise typer.Exit


def options_before(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            callback=_print_report,
            is_eager=True,
            help="Show versions, GPUs and system for the report of a bug, and exit.",
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command, as the callback of a Typer app."""


def command_group(help: str) -> typer.Typer:
    """Return a command of subcommands, which are registered with it."""
    return typer.Typer(
        help=help, cls=Subcommands, callback=options_before, no_args_is_help=True, add_completion=False,
        pretty_exceptions_enable=False,
    )  # fmt: skip
