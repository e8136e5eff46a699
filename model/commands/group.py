"""``Subcommands``, which take no empty arguments, and the option ``--version``, of all three commands."""

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..basics.bad_input import BadInput
from .errors import one_line_errors


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


def version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command, as the callback of a Typer app."""
