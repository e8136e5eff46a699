"""Kinds of figures: name, function that draws it, records it is drawn from; draws and saves one or several."""

import json
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..autotune.records.json_text import no_garbage_collection
from ..autotune.records.record import made_of
from .records import COMMITTED, Known, NoRecords, read_kinds

#: The figures that come with the package, each with its numbers.
GALLERY = Path(__file__).parent / "gallery"
#: A matplotlib figure, and everything that it shows as JSON values, "title" and "stamp" among them.
Drawn = tuple[Any, dict[str, Any]]


class FigureKind(NamedTuple):
    """A figure that can be drawn from records, by the module of its name in ``figures``.

    ``draw`` there draws what ``read`` returns, and raises ``NoRecords`` where records that it needs are missing, and
    ``BadRecord``. ``read``, if it is there, takes the paths of files, the kinds of records and what is known; else
    ``read_kinds`` does. ``redraw``, if it is there, draws the figure again from its numbers in the gallery, where its
    records, too large for a wheel, are not there.
    """

    name: str
    """Name of the subcommand, of the files, and, with _ for -, of the module."""
    finding: str
    """One line on what the figure shows, the help of the subcommand."""
    kinds: tuple[str, ...]
    """Kinds of the records that it is drawn from."""
    files: tuple[str, ...]
    """Files of the package's own records, in autotune/records."""
    made_by: str
    """The command that measures such records; "" where none does any more."""

    @property
    def module(self) -> ModuleType:
        """What draws it, imported when it is needed: matplotlib takes longer than help should."""
        return import_module(f".figures.{self.name.replace('-', '_')}", __package__)

    def make(self, paths: Sequence[Path] | None = None, known: Known | None = None) -> Drawn:
        """Draw it from files, None for those of the package; records of other kinds are passed over.

        Args:
            paths: the files.
            known: what other figures were drawn from; what this one is drawn from is added.

        Raises:
            NoRecords: there is nothing to draw; names the command that measures it.
            BadRecord: a file that does not hold records, or records of several devices or versions.
        """
        own, module = [COMMITTED / file for file in self.files], self.module
        if paths is None and hasattr(module, "redraw") and not all(path.exists() for path in own):
            drawn = json.loads((GALLERY / f"{self.name}.json").read_text(encoding="utf-8"))
            return module.redraw(drawn), drawn
        try:
            files = own if paths is None else self._of_format(paths)
            read = getattr(module, "read", read_kinds)
            found: Drawn = module.draw(read(files, self.kinds, {} if known is None else known))
            return found
        except NoRecords as error:
            how = f"`{self.made_by}` makes it" if self.made_by else "no command of this version makes it"
            raise NoRecords(f"{error}; {how}") from None

    def _of_format(self, paths: Sequence[Path]) -> list[Path]:
        ends = [_format(file) for file in self.files]
        found = [path for path in paths if _format(path.name) in ends]
        if not found:
            raise NoRecords(f"{', '.join(map(str, paths))}: wants a name that ends in {' or '.join(ends)}")
        return found


def _format(file: str) -> str:
    """Return the ending of a file's name without that of the compression."""
    return Path(file.removesuffix(".gz")).suffix


#: Processes that draw: records of sweeps take one of them about as long as everything else the other.
_PROCESSES = 2


class Saved(NamedTuple):
    """A figure that was drawn, or not."""

    name: str
    paths: list[Path]
    left_out: str = ""
    """Reason, if there are no records of it."""


def save_all(kinds: Sequence[FigureKind], records: Sequence[Path] | None, out: Path) -> Iterator[Saved]:
    """Draw figures into a folder, and yield them in their order; raises what ``FigureKind.make`` does.

    Figures of the package's records are drawn by processes of their own.
    """
    if records is not None:
        known: Known = {}
        yield from (_save(kind, records, out, known) for kind in kinds)
        return
    groups: dict[tuple[str, ...], list[FigureKind]] = {}
    for kind in kinds:
        groups.setdefault(kind.files, []).append(kind)
    # other ways to start processes copy this one, threads of who knows what included
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_PROCESSES, context, signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
        largest_first = sorted(groups, key=_bytes, reverse=True)
        drawn: dict[str, Future[list[Saved]]] = {}
        for files in largest_first:
            begun = pool.submit(_save_group, groups[files], out)
            drawn |= {kind.name: begun for kind in groups[files]}
        try:
            for kind in kinds:
                yield next(one for one in drawn[kind.name].result() if one.name == kind.name)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _bytes(files: Sequence[str]) -> int:
    return sum(path.stat().st_size for file in files if (path := COMMITTED / file).exists())


def _save_group(kinds: Sequence[FigureKind], out: Path) -> list[Saved]:
    known: Known = {}
    return [_save(kind, None, out, known) for kind in kinds]


def _save(kind: FigureKind, records: Sequence[Path] | None, out: Path, known: Known) -> Saved:
    from .files import save_figure  # matplotlib, which help need not wait for

    try:
        with no_garbage_collection(), made_of(records or kind.files):
            return Saved(kind.name, save_figure(*kind.make(records, known), out / kind.name))
    except NoRecords as error:
        return Saved(kind.name, [], str(error))
