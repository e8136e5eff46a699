"""Runs a sweep: networks that differ in the batch size alone together; then prints what their records decide."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.kernel_hash import kernel_hash
from ...model.basics.bad_input import BadInput
from ..measuring.cells import Cell
from ..measuring.compile_pool import CompilePool
from ..measuring.environment import release_memory
from ..measuring.failures import DeviceLost
from ..measuring.head_timing import HeadTiming
from ..measuring.networks import find_networks
from ..measuring.options import NetworkChoice
from ..measuring.progress import Status, SweepProgress, failures_in_words
from ..records.record import read_records
from ..records.tables import print_tables, wide_console
from .measure import Sweep, measure_winners_at_neighbours
from .records import SweepRecords
from .search import STRATEGIES
from .winners import shape_of, sweep_tables


def run_sweep(chosen: NetworkChoice, effort: str, out: Path | None) -> None:
    """Measure what the strategy named ``effort`` asks for of the networks chosen, and print their winners.

    Raises:
        BadInput: no CUDA device, no such network, or a device that was lost.
        BadRecord: ``out`` cannot be read.
    """
    console = wide_console()
    networks = find_networks("sweep", chosen.own, chosen.cells, out)
    asked: set[HeadShape] = set()
    done = 0
    failures: Counter[str] = Counter()
    capability = torch.cuda.get_device_capability(networks.device)
    with CompilePool(capability) as pool, SweepProgress(console) as progress:

        def swept(cell: Cell, number: int) -> Sweep:
            def show(status: Status) -> None:
                progress.show(status._replace(done=(number + status.done) / len(networks.cells)))

            show(Status(0.0, f"{cell}: building", "", failures))
            measurer = HeadTiming(networks.subject(cell), pool=pool)
            protocol = {"kernel": kernel_hash(), **measurer.protocol}
            records = SweepRecords(networks.where, networks.environment, protocol, measurer.of_network)
            sweep = Sweep(measurer, STRATEGIES[effort], records, show, failures)
            asked.update(target.shape for target in measurer.targets)
            sweep.run(measurer.targets)
            return sweep

        for family in _families(networks.cells):
            try:
                sweeps = [swept(cell, number) for number, cell in enumerate(family, start=done)]
                measure_winners_at_neighbours(tuning for sweep in sweeps for tuning in sweep.tunings)
            except DeviceLost as error:
                raise BadInput(f"{error}; what was measured is recorded: the same command goes on") from None
            done += len(family)
            del sweeps  # and the networks
            release_memory()
    model = networks.cells[0].model
    found = [record for record in read_records(networks.where) if record.kind == "sweep"]
    found = [record for record in found if shape_of(record) in asked and record.cell.get("model", model) == model]
    print_tables(console, sweep_tables(found))
    if failures:
        console.print(f"Not timed: {failures_in_words(failures)}", soft_wrap=True)
    console.print(f"Records: {networks.where}", soft_wrap=True)


def _families(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group cells that differ in the batch size alone."""
    found: dict[Cell, list[Cell]] = {}
    for cell in cells:
        found.setdefault(dataclasses.replace(cell, batch=0), []).append(cell)
    return list(found.values())
