"""Commands of ``auxhead-plot``: one for each figure, one for all of them, and one for Perfetto traces."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..autotune.records.record import BadRecord, made_of
from ..model.basics.files import is_standard_output
from ..model.commands.console import activity, plain_console
from ..model.commands.errors import command_group, one_line_errors
from .figures.registry import FIGURES, FigureKind
from .records import Known, NoRecords

Records = Annotated[
    list[Path] | None,
    typer.Option(help="A file of records; may be given several times.", show_default="those that come with auxhead"),
]
_WRITTEN = "Where the figure goes, without an ending: OUT.png, OUT.svg and OUT.json are written."
Stem = Annotated[Path | None, typer.Option(help=_WRITTEN, show_default="the figure's name")]

app = command_group("Figures from records; needs no GPU.")


@app.command(name="all")
def every_figure(
    records: Records = None,
    out: Annotated[Path, typer.Option(help="The folder that the figures go to.")] = Path("auxhead-plots"),
) -> None:
    """Draw every figure whose records are there, and say of the others how to make theirs."""
    with one_line_errors(BadRecord):
        for path in records or []:
            if not path.exists():
                raise BadRecord(f"--records: {path}: no such file")
        saved, known = False, Known()
        for name, kind in FIGURES.items():
            try:
                with activity(f"Drawing {name}"):
                    paths = kind.save(records or None, out / name, known)
            except NoRecords as error:
                plain_console().print(f"Left out: {name}. {error}", soft_wrap=True)
                continue
            saved = True
            _print_saved(paths)
        if not saved:
            raise BadRecord("--records: got none that a figure is drawn from")


@app.command()
def perfetto(
    records: Annotated[Path, typer.Argument(help="Records of `auxhead-tune overlap`.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="The trace, replaced if it is there; compressed if OUT ends in .gz.")
    ] = Path("trace.json"),
) -> None:
    """Write timelines as a Chrome trace, with lanes of trunk, heads and SMs; ui.perfetto.dev opens it."""
    with one_line_errors(BadRecord):
        from .figures.timeline import write_trace  # matplotlib, which help need not wait for

        with made_of([records]):
            write_trace(records, out)
        if not is_standard_output(out):
            _print_saved([out])


def _print_saved(paths: list[Path]) -> None:
    plain_console().print("Saved " + ", ".join(map(str, paths)), soft_wrap=True)


def _figure_command(kind: FigureKind) -> Callable[..., None]:
    """Return the subcommand of a figure."""

    def command(records: Records = None, out: Stem = None) -> None:
        stem = out or Path(kind.name)
        with one_line_errors(BadRecord):
            if stem.name in ("", ".."):
                raise BadRecord(f"--out: got {stem}, wants the name of a figure, as {stem / kind.name}")
            with activity(f"Drawing {kind.name}"):
                saved = kind.save(records, stem.with_suffix("") if stem.suffix in (".png", ".svg", ".json") else stem)
            _print_saved(saved)

    return command


for _kind in FIGURES.values():
    app.command(name=_kind.name, help=_kind.finding)(_figure_command(_kind))
