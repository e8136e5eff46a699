"""Networks that a command measures: looked for before the device is, then made on it; with the file of the records."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..records.record import records_path
from .cells import Cell
from .environment import environment, this_device
from .subject import Subject, build_subject, find_subject


class Networks(NamedTuple):
    """Networks on one CUDA device, and the file that their records are appended to."""

    cells: Sequence[Cell]
    own: Subject | None
    """The user's network, if it is one: the only cell is its."""
    device: torch.device
    environment: dict[str, Any]
    """See :class:`~auxhead.autotune.records.record.Record`."""
    where: Path

    def subject(self, cell: Cell) -> Subject:
        """Return the user's network, or make one of torchvision's."""
        return self.own or build_subject(cell, self.device)


def find_networks(
    kind: str, own: str | None, cells: Sequence[Cell], out: Path | None, *, option: str = "MODEL",
    check: Callable[[Sequence[Cell]], None] = lambda cells: None,
) -> Networks:  # fmt: skip
    """Find networks for the command that measures records of a kind; wrong names are told whatever the machine lacks.

    Args:
        kind: of the records.
        own: the user's factory; None: ``cells`` of ResNets.
        cells: of ResNets.
        out: file of the records; None: the usual one.
        option: that names the factory.
        check: refuses what of the options does not fit the cells.

    Raises:
        BadInput: no such function, no CUDA device, or a network that is none; see ``find_subject``.
    """
    make = None if own is None else find_subject(own, option)
    if make is None:
        check(cells)
    device = this_device(kind)
    subject = None if make is None else make()
    if subject is not None:
        cells = [subject.cell]
        check(cells)
    where = records_path(out, kind, torch.cuda.get_device_name(device))
    return Networks(cells, subject, device, environment(device), where)
