"""The command ``auxhead-plot``: registers ``all``, ``perfetto`` and a subcommand for each figure."""

import typer

from ..model.commands.errors import Subcommands, version_option
from .commands import all_command, figure_command, perfetto
from .figures.registry import FIGURES

app = typer.Typer(
    help="Figures from records; needs no GPU.",
    cls=Subcommands,
    callback=version_option,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command(name="all")(all_command(FIGURES))
app.command()(perfetto)
for _kind in FIGURES.values():
    app.command(name=_kind.name, help=_kind.finding)(figure_command(_kind))


if __name__ == "__main__":
    app()
