"""The command ``auxhead-plot``: one subcommand a figure."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .exits import plot_exits
from .figure_files import BadRecord, read_record, save_figure

app = typer.Typer(help="Figures from records; needs no GPU.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Figures from records; needs no GPU."""


@app.command()
def exits(
    report: Annotated[Path, typer.Argument(help="The report.json of `auxhead demo`.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="Where the figure goes, without an ending: OUT.png, OUT.svg and OUT.json are written.")
    ] = Path("exits"),
) -> None:
    """Draw how many images leave at each exit, and how often they are right."""
    try:
        figure, drawn = plot_exits(read_record(report))
        paths = save_figure(figure, drawn, out.with_suffix("") if out.suffix in (".png", ".svg", ".json") else out)
    except BadRecord as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename or out}: {error.strerror or error}"
    else:
        print("Saved " + ", ".join(str(path) for path in paths))
        return
    print(f"Error: {message}", file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
