"""The command ``auxhead-plot``: one subcommand a figure, and all of them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..autotune.records.record import BadRecord
from .figures.registry import FIGURES, FigureKind
from .files import save_figure
from .perfetto import write_trace
from .records import NoRecords

app = typer.Typer(help="Figures from records; needs no GPU.", no_args_is_help=True, add_completion=False)

Records = Annotated[
    list[Path] | None,
    typer.Option(help="A file of records; may be given several times.", show_default="those that come with auxhead"),
]
Stem = Annotated[
    Path | None,
    typer.Option(
        help="Where the figure goes, without an ending: OUT.png, OUT.svg and OUT.json are written.",
        show_default="the figure's name",
    ),
]


@app.command(name="all")
def every(
    records: Records = None,
    out: Annotated[Path, typer.Option(help="The folder that the figures go to.")] = Path("auxhead-plots"),
) -> None:
    """Draw every figure whose records are there, and say of the others how to make theirs."""
    with _one_line_errors(out):
        for path in records or []:
            if not path.exists():
                raise BadRecord(f"--records: {path}: no such file")
        saved = 0
        for kind in FIGURES:
            try:
                figure, drawn = kind.make(records)
            except NoRecords as error:
                print(f"Left out: {kind.name}. {error}")
            else:
                _say(save_figure(figure, drawn, out / kind.name))
                saved += 1
        if not saved:
            raise BadRecord("--records: got none that a figure is drawn from")


def _command(kind: FigureKind) -> Callable[..., None]:
    """Return the subcommand of a figure."""

    def command(records: Records = None, out: Stem = None) -> None:
        stem = out or Path(kind.name)
        with _one_line_errors(stem):
            figure, drawn = kind.make(records)
            _say(save_figure(figure, drawn, stem.with_suffix("") if stem.suffix in (".png", ".svg", ".json") else stem))

    return command


def _say(paths: list[Path]) -> None:
    print("Saved " + ", ".join(str(path) for path in paths))


@contextmanager
def _one_line_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except BadRecord as error:
        message = str(error)
    except BrokenPipeError:  # whoever read the output has seen enough: no error of ours, click ends quietly
        raise
    except OSError as error:
        message = f"{error.filename or out}: {error.strerror or error}"
    else:
        return
    print(f"Error: {message}", file=sys.stderr)
    raise typer.Exit(2)


@app.command()
def perfetto(
    records: Annotated[Path, typer.Argument(help="Records of `auxhead-tune overlap`.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="The trace, replaced if it is there; compressed if OUT ends in .gz.")
    ] = Path("trace.json"),
) -> None:
    """Write timelines as a Chrome trace, with lanes of trunk, heads and SMs; ui.perfetto.dev opens it."""
    with _one_line_errors(out):
        write_trace(records, out)
        _say([out])


for _kind in FIGURES:
    app.command(name=_kind.name, help=_kind.finding)(_command(_kind))


if __name__ == "__main__":
    app()
