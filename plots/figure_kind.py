"""One kind of figure: its name, the function that draws it, and the records that it is drawn from."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .records import COMMITTED, Known, NoRecords, read_kinds

#: The figures that come with the package, each with its numbers.
GALLERY = Path(__file__).parent / "gallery"
#: A matplotlib figure, and everything that it shows as JSON values, "title" and "stamp" among them.
Drawn = tuple[Any, dict[str, Any]]


class Drawing(NamedTuple):
    """Functions that draw a figure."""

    draw: Callable[[Any], Drawn]
    """Draws what ``read`` returns. Raises ``NoRecords`` where records that it needs are missing, and ``BadRecord``."""
    read: Callable[[Sequence[Path], Sequence[str], Known], Any] = read_kinds
    """Reads files; takes their paths, the kinds of records and what is known."""
    redraw: Callable[[Mapping[str, Any]], Any] | None = None
    """Draws it again from its numbers in the gallery, where its records, too large for a wheel, are not there."""


class FigureKind(NamedTuple):
    """A figure that can be drawn from records."""

    name: str
    """Name of the subcommand and of the files."""
    finding: str
    """One line on what the figure shows, the help of the subcommand."""
    kinds: tuple[str, ...]
    """Kinds of the records that it is drawn from."""
    files: tuple[str, ...]
    """Files of the package's own records, in autotune/records."""
    made_by: str
    """The command that measures such records."""
    drawing_of: Callable[[str], Drawing]
    """Imports the functions that draw a figure, told by its name: matplotlib takes longer than help should."""

    @property
    def drawing(self) -> Drawing:
        """The functions that draw it."""
        return self.drawing_of(self.name)

    def make(self, paths: Sequence[Path] | None = None, known: Known | None = None) -> Drawn:
        """Draw it from files, None for those of the package; records of other kinds are passed over.

        Args:
            paths: the files.
            known: what other figures were drawn from; what this one is drawn from is added.

        Raises:
            NoRecords: there is nothing to draw; names the command that measures it.
            BadRecord: a file that does not hold records, or records of several devices or versions.
        """
        own, drawing = [COMMITTED / file for file in self.files], self.drawing
        if paths is None and drawing.redraw is not None and not all(path.exists() for path in own):
            drawn = json.loads((GALLERY / f"{self.name}.json").read_text(encoding="utf-8"))
            return drawing.redraw(drawn), drawn
        try:
            files = own if paths is None else self._of_format(paths)
            return drawing.draw(drawing.read(files, self.kinds, {} if known is None else known))
        except NoRecords as error:
            raise NoRecords(f"{error}; `{self.made_by}` makes it") from None

    def _of_format(self, paths: Sequence[Path]) -> list[Path]:
        ends = [_format(file) for file in self.files]
        found = [path for path in paths if _format(path.name) in ends]
        if not found:
            raise NoRecords(f"{', '.join(map(str, paths))}: wants a name that ends in {' or '.join(ends)}")
        return found


def _format(file: str) -> str:
    """Return the ending of a file's name without that of the compression."""
    return Path(file.removesuffix(".gz")).suffix
