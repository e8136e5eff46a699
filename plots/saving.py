"""Draws and saves several figures: those of the same records one after another, others beside them."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ..autotune.records.garbage import no_garbage_collection
from ..autotune.records.record import made_of
from .figure_kind import FigureKind
from .records import COMMITTED, Known, NoRecords

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
