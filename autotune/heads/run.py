"""Runs the measurement of heads alone: those that the file of records lacks, network by network."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...kernels.kernel_hash import kernel_hash
from ...model.bad_input import BadInput
from ..measuring.cells import Cell
from ..measuring.environment import clocks, environment, release_memory, this_device
from ..measuring.failures import DeviceLost, Failure
from ..measuring.head_timing import CopySpeed, HeadTiming, measure_copy_speed
from ..measuring.heads_alone import LAUNCHES
from ..measuring.networks import find_networks
from ..measuring.options import NetworkChoice
from ..measuring.progress import Status, SweepProgress
from ..measuring.subject import Subject, build_subject
from ..measuring.targets import ALONE
from ..measuring.timers import CAPTURES, FINAL_ROUNDS
from ..records.record import read_records, records_path
from ..records.tables import print_tables, wide_console
from .records import KIND, Head, HeadRecords
from .tables import head_tables


def run_heads(chosen: NetworkChoice, out: Path | None) -> None:
    """Measure the heads of the networks chosen, and print the table of them.

    Raises:
        BadInput: no CUDA device, no such network, or a device that was lost.
        BadRecord: ``out`` cannot be read.
    """
    console = wide_console()
    make = find_networks(chosen)
    device = this_device(KIND)
    where = records_path(out, KIND, torch.cuda.get_device_name(device))
    own, cells = make()
    with SweepProgress(console) as progress:
        run = _Run(device, where, progress.show, len(cells))
        for cell in cells:
            run.measure(cell, own)
    found = [record for record in read_records(where) if record.cell in run.asked]
    print_tables(console, head_tables(found), where)


class _Run:
    """Measures the heads of networks that the file of records lacks."""

    def __init__(self, device: torch.device, where: Path, show: Callable[[Status], None], cells: int) -> None:
        self.asked: list[dict[str, Any]] = []
        """The cells of the heads of all networks so far, measured or found."""
        self._device = device
        self._where = where
        self._show = show
        self._cells = cells
        self._done = 0
        self._environment = environment(device)
        self._failures: Counter[str] = Counter()
        self._speed: CopySpeed | None = None

    def measure(self, cell: Cell, own: Subject | None) -> None:
        """Measure the heads of one network, the user's own or one of torchvision's."""
        self._tell(f"{cell}: building", 0.0)
        timing = HeadTiming(own or build_subject(cell, self._device), "as_is")
        how = {"place": ALONE, "rounds": FINAL_ROUNDS, "captures": CAPTURES}
        kept = HeadRecords(self._where, self._environment, {"kernel": kernel_hash(), **timing.protocol, **how})
        kind = {name: value for name, value in cell.as_json().items() if name == "heads"}
        for index, (target, alone) in enumerate(timing.heads.items()):
            head = Head(target, alone.chosen, alone.bytes_moved, kind)
            self.asked.append(head.cell)
            if not kept.has(head):
                self._measure_head(timing, head, kept, index)
        self._done += 1
        del timing, alone
        release_memory()

    def _measure_head(self, timing: HeadTiming, head: Head, kept: HeadRecords, index: int) -> None:
        self._speed = self._speed or measure_copy_speed(self._device, FINAL_ROUNDS)

        def begins(variant: str) -> None:
            of_head = list(LAUNCHES).index(variant) / len(LAUNCHES)
            self._tell(f"{head.target}: {variant}", (index + of_head) / len(timing.heads))

        try:
            results = timing.against_peers(head.target, FINAL_ROUNDS, CAPTURES, begins)
        except DeviceLost as error:
            kept.add(head, dict.fromkeys(LAUNCHES, Failure("DeviceLost", str(error))), self._speed, None)
            raise BadInput(f"{error}; it is recorded: the same command goes on with the rest") from None
        self._failures.update(result.kind for result in results.values() if isinstance(result, Failure))
        kept.add(head, results, self._speed, clocks(self._device))

    def _tell(self, doing: str, of_cell: float) -> None:
        """Show what begins, with the share of the network under way that is done."""
        self._show(Status((self._done + of_cell) / self._cells, doing, "", self._failures))
