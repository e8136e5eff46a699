"""One kind of figure: its name, the function that draws it, and the records that it is drawn from."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from .records import COMMITTED, NoRecords, read_kinds

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
