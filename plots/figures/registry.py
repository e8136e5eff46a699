"""The registry: every figure, what it is drawn from, and the command that measures that."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from ..records import COMMITTED, NoRecords, read_kinds
from ..timelines import KINDS
from . import exits, footprint, landscape, latency, pareto, profile, ranks, roofline, time_to_answer, timeline

#: Figures that were drawn, each with its numbers.
GALLERY = Path(__file__).parents[1] / "gallery"
#: The figure, and everything that it shows: with "title" and "stamp", in a form that fits into JSON.
Drawn = tuple[Figure, dict[str, Any]]


class FigureKind(NamedTuple):
    """One figure: a module with one function that draws it."""

    name: str
    """Of the subcommand and of the files."""
    draw: Callable[[Any], Drawn]
    """From what ``read`` returns; the first line of its docstring says what the figure shows. Raises ``BadRecord``, or
    ``NoRecords`` where those that it needs are not among them."""
    kinds: tuple[str, ...]
    """Of the records that it is drawn from."""
    files: tuple[str, ...]
    """Where those that come with the package are, in autotune/records."""
    made_by: str
    """The command that makes such records."""
    read: Callable[[Sequence[Path], Sequence[str]], Any] = read_kinds
    """Given the files and ``kinds``."""
    redraw: Callable[[Mapping[str, Any]], Figure] | None = None
    """Draws the gallery's numbers, where records that are too large for a wheel are not there."""

    @property
    def finding(self) -> str:
        """What the figure shows, in a line."""
        return (self.draw.__doc__ or "").strip().partition("\n")[0]

    def make(self, paths: Sequence[Path] | None = None) -> Drawn:
        """Draw it from files; of those, whatever is not of its kinds is passed over. None: those of the package.

        Raises:
            NoRecords: what it is drawn from is not there; names the command that makes it.
            BadRecord: a file that is none of records, or records of several devices or versions.
        """
        if paths is None and self.redraw is not None and not all((COMMITTED / file).exists() for file in self.files):
            drawn = json.loads((GALLERY / f"{self.name}.json").read_text(encoding="utf-8"))
            return self.redraw(drawn), drawn
        if paths is None:
            own = [COMMITTED / file for file in self.files]
        else:
            formats = {_format(file) for file in self.files}
            own = [path for path in paths if _format(path.name) in formats]
        try:
            if paths and not own:
                given, ends = ", ".join(map(str, paths)), " or ".join(map(_format, self.files))
                raise NoRecords(f"{given}: wants a name that ends in {ends}")
            return self.draw(self.read(own, self.kinds))
        except NoRecords as error:
            raise NoRecords(f"{error}; `{self.made_by}` makes it") from None


def _format(file: str) -> str:
    """Return what a file's name ends with, compressed or not."""
    return Path(file.removesuffix(".gz")).suffix


#: Records of a sweep, in the repository only: 11 MB.
SWEPT = ("h200/sweep.jsonl.gz",)
#: In the order of the gallery.
FIGURES = (
    FigureKind("exits", exits.draw, ("demo",), ("cpu/demo-digits.json",), "auxhead demo", exits.read_report),
    FigureKind(
        "footprint",
        footprint.draw,
        ("footprint",),
        ("h200/footprint.jsonl",),
        "auxhead-tune footprint resnet18 --classes 10 --batch 1 --batch 32",
    ),
    FigureKind("latency", latency.draw, ("bench",), ("h200/bench.jsonl",), "auxhead-tune bench"),
    FigureKind("time-to-answer", time_to_answer.draw, ("bench",), ("h200/bench.jsonl",), "auxhead-tune bench"),
    FigureKind("timeline", timeline.draw, KINDS, ("h200/overlap.jsonl",), "auxhead-tune overlap MODEL"),
    FigureKind("ranks", ranks.draw, ("sweep",), SWEPT, "auxhead-tune sweep resnet18", redraw=ranks.redraw),
    FigureKind("landscape", landscape.draw, ("sweep",), SWEPT, "auxhead-tune sweep resnet18", redraw=landscape.redraw),
    FigureKind("pareto", pareto.draw, ("pareto",), ("h200/pareto.jsonl",), "auxhead-tune pareto --checkpoint DIR"),
    FigureKind("roofline", roofline.draw, ("heads",), ("h200/heads.jsonl",), "auxhead-tune heads resnet18"),
    FigureKind("profile", profile.draw, ("profile",), ("h200/profile.jsonl",), "auxhead profile --checkpoint DIR"),
)
