"""Commands of ``auxhead-plot``: one for each figure, one for all of them, and one for Perfetto traces."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from ..autotune.records.record import BadRecord, made_of
from ..model.basics.files import is_standard_output
from ..model.commands.console import activity, plain_console
from ..model.commands.errors import command_group, one_line_errors
from .figures.registry import FIGURES, FigureKind
from .records import Known, NoRecords, own_files

Records = Annotated[
    list[Path] | None,
    typer.Option(
        help="A file of records; may be given several times.",
        show_default="yours that were written last here, or those that come with auxhead",
    ),
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
                _draw(kind, records, out / name, known)
            except NoRecords as error:
                plain_console().print(f"Left out: {name}. {error}", soft_wrap=True)
                continue
            saved = True
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


def _draw(kind: FigureKind, records: list[Path] | None, stem: Path, known: Known) -> None:
    """Draw a figure and save it; of no given records it is of the user's last ones, else of the package's, and says so.

    Raises as :meth:`FigureKind.save`.
    """
    own: Path | None = None
    with activity(f"Drawing {kind.name}"):
        for own in [] if records else own_files(Path()):
            try:
                saved = kind.save([own], stem, known)
                break
            except BadRecord:  # of other kinds
                continue
        else:
            own, saved = None, kind.save(records or None, stem, known)
    if not records:
        measured = json.loads(stem.with_name(f"{stem.name}.json").read_text(encoding="utf-8"))["stamp"].splitlines()[-1]
        makes = f" `{kind.made_by}` makes yours." if kind.made_by else ""
        whose = f"{kind.file}, which comes with auxhead"
        if own is not None:
            whose = f"{own}, yours, written on {date.fromtimestamp(own.stat().st_mtime)}"
        plain_console().print(f"Of {whose}: {measured}.{'' if own else makes}", soft_wrap=True)
    _print_saved(saved)


def _print_saved(paths: list[Path]) -> None:
    plain_console().print("Saved " + ", ".join(map(str, paths)), soft_wrap=True)


def _figure_command(kind: FigureKind) -> Callable[..., None]:
    """Return the subcommand of a figure."""

    def command(records: Records = None, out: Stem = None) -> None:
        stem = out or Path(kind.name)
        with one_line_errors(BadRecord):
            if stem.name in ("", ".."):
                raise BadRecord(f"--out: got {stem}, wants the name of a figure, as {stem / kind.name}")
            _draw(kind, records, stem.with_suffix("") if stem.suffix in (".png", ".svg", ".json") else stem, {})

    return command


for _kind in FIGURES.values():
    app.command(name=_kind.name, help=_kind.finding)(_figure_command(_kind))
