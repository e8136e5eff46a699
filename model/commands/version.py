"""The option ``--version`` of all three commands."""

from importlib.metadata import version
from typing import Annotated

import typer


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
