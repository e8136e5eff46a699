"""Runs a sweep: networks that differ in the batch size alone together, or the records of earlier sweeps."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ...kernels.launch.kernel_hash import kernel_hash
from ...model.basics.bad_input import BadInput
from ...model.commands.console import activity
from ..measuring.cells import Cell
from ..measuring.environment import release_memory
from ..measuring.failures import DeviceLost
from ..measuring.head_timing import HeadTiming
from ..measuring.networks import find_networks
from ..measuring.options import NetworkChoice
from ..measuring.progress import Status, SweepProgress, failures_in_words
from ..measuring.targets import Target
from ..records.record import read_records
from ..records.tables import print_tables, wide_console
from .measure import Sweep, measure_winners_at_neighbours
from .records import RecordedTimes, SweepRecords, recorded_targets
from .search import STRATEGIES
from .winners import HeadWinners, winner_tables


def run_sweep(chosen: NetworkChoice, effort: str, out: Path | None) -> None:
    """Measure what the strategy named ``effort`` asks for of the networks chosen, and print their winners.

    Raises:
        BadInput: no CUDA device, no such network, or a device that was lost.
        BadRecord: ``out`` cannot be read.
    """
    console = wide_console()
    networks = find_networks("sweep", chosen.own, chosen.cells, out, otherwise="; --replay needs none")
    found: list[tuple[str, list[HeadWinners]]] = []
    failures: Counter[str] = Counter()
    with SweepProgress(console) as progress:

        def swept(cell: Cell, number: int) -> Sweep:
            def show(status: Status) -> None:
                progress.show(status._replace(done=(number + status.done) / len(networks.cells)))

            show(Status(0.0, f"{cell}: building", "", failures))
            measurer = HeadTiming(networks.subject(cell))
            protocol = {"kernel": kernel_hash(), **measurer.protocol}
            records = SweepRecords(networks.where, networks.environment, protocol, measurer.of_network)
            sweep = Sweep(measurer, STRATEGIES[effort], records, show, failures)
            sweep.run(measurer.targets)
            return sweep

        for family in _families(networks.cells):
            try:
                sweeps = {cell: swept(cell, number) for number, cell in enumerate(family, start=len(found))}
                measure_winners_at_neighbours(tuning for sweep in sweeps.values() for tuning in sweep.tunings)
            except DeviceLost as error:
                raise BadInput(f"{error}; what was measured is recorded: the same command goes on") from None
            found += [(str(cell), sweep.winners) for cell, sweep in sweeps.items()]
            del sweeps  # and the networks
            release_memory()
    _report(console, found, failures)
    console.print(f"Records: {networks.where}", soft_wrap=True)


def replay_sweep(chosen: NetworkChoice, effort: str, path: Path) -> None:
    """Search in the records of a file, and print the winners.

    Raises:
        BadInput: nothing of the networks chosen is there.
        BadRecord: the file cannot be read.
    """
    console = wide_console()
    with activity(f"Reading {path}"):
        records = read_records(path)
    targets = [target for target in recorded_targets(records, chosen.model) if _fits(chosen, target)]
    if not targets:
        raise BadInput(f"--replay: {path} holds nothing of {chosen.model} like this, wants records of such a sweep")
    with SweepProgress(console) as progress:
        sweep = Sweep(RecordedTimes(records), STRATEGIES[effort], SweepRecords(None, {}, {}, {}), progress.show)
        sweep.run(targets)
        measure_winners_at_neighbours(sweep.tunings)
    by_network: dict[str, list[HeadWinners]] = {}
    for winners in sweep.winners:
        shape = winners.target.shape
        title = f"{chosen.model} {shape.dtype}, batch {shape.samples}, {shape.classes} classes, from {path}"
        by_network.setdefault(title, []).append(winners)
    _report(console, list(by_network.items()), sweep.failures)


def _fits(chosen: NetworkChoice, target: Target) -> bool:
    """Return True if a recorded target is of what was asked for; the placement of heads is not recorded."""
    of_target = {"batch": target.shape.samples, "dtype": target.shape.dtype, "classes": target.shape.classes}
    return all(of_target[name] in values for name, values in chosen.asked.items())


def _families(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group cells that differ in the batch size alone."""
    found: dict[Cell, list[Cell]] = {}
    for cell in cells:
        found.setdefault(dataclasses.replace(cell, batch=0), []).append(cell)
    return list(found.values())


def _report(console: Console, found: Sequence[tuple[str, Sequence[HeadWinners]]], failures: Counter[str]) -> None:
    print_tables(console, winner_tables(found))
    if failures:
        console.print(f"Not timed: {failures_in_words(failures)}", soft_wrap=True)
