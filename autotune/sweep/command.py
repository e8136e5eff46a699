"""The command ``auxhead-tune sweep``."""

import dataclasses
import gc
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ...kernels.kernel_hash import kernel_hash
from ...model.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..heads.compile_ahead import CompileAhead
from ..heads.measure import HeadTiming
from ..measuring.cells import Cell
from ..measuring.environment import environment, this_device
from ..measuring.failures import DeviceLost
from ..measuring.interrupts import resumable
from ..measuring.options import Batches, Classes, Dtypes, Model, NetworkChoice, Placements
from ..measuring.progress import Status, SweepProgress, failures_in_words
from ..measuring.subject import build_subject
from ..measuring.targets import Target
from ..records.record import BadRecord, read_records, records_path
from ..records.tables import print_tables, wide_console
from .measure import Sweep
from .neighbouring_batches import measure_winners_at_neighbours
from .recorded_times import RecordedTimes, recorded_targets
from .records import SweepRecords
from .strategies import STRATEGIES
from .tables import winner_tables
from .winners import HeadWinners


class Effort(str, Enum):
    """Names of strategies, by the effort that a sweep takes."""

    quick = "quick"
    full = "full"


def sweep(
    model: Model,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    effort: Annotated[Effort, typer.Option(help="About a minute a network, or five.")] = Effort.quick,
    out: Annotated[
        Path | None, typer.Option(help="Records are appended here.", show_default="autotune-records/sweep-DEVICE.jsonl")
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="Search in these records instead of measuring; needs no GPU.", show_default=False),
    ] = None,
) -> None:
    """Tune the launches of a network's heads, alone and beside the trunk of the captured network.

    Options that choose networks may be given several times; winners of batch sizes given together are measured at each
    other's, too. What is recorded is not measured again: a run that was stopped, at whatever moment, goes on where it
    was.
    """
    console = wide_console()
    chosen = NetworkChoice.of(model, batch, dtype, classes, placement)
    with one_line_errors(BadRecord):
        if replay is not None:
            if out is not None:
                raise BadInput(f"--out: got {out} with --replay, wants none: nothing is measured")
            if placement:
                raise BadInput("--placement: records do not say it of a head, wants none with --replay")
            _replay(console, chosen, effort, replay)
        else:
            with resumable():
                _measure(console, chosen, effort, out)


def _measure(console: Console, chosen: NetworkChoice, effort: Effort, out: Path | None) -> None:
    device = this_device("sweep", "; --replay needs none")
    own, cells = chosen.networks()
    where = records_path(out, "sweep", torch.cuda.get_device_name(device))
    found: list[tuple[str, list[HeadWinners]]] = []
    failures: Counter[str] = Counter()
    with SweepProgress(console) as progress, CompileAhead.beside(device) as ahead:

        def swept(cell: Cell, number: int) -> Sweep:
            def show(status: Status) -> None:
                progress.show(status._replace(done=(number + status.done) / len(cells)))

            show(Status(0.0, f"{cell}: building", "", failures))
            measurer = HeadTiming(own or build_subject(cell, device), ahead=ahead)
            protocol = {"kernel": kernel_hash(), **measurer.protocol}
            records = SweepRecords(where, environment(device), protocol, measurer.of_network)
            sweep = Sweep(measurer, STRATEGIES[effort.value], records, show, failures)
            sweep.run(measurer.targets)
            return sweep

        for family in _families(cells):
            try:
                sweeps = {cell: swept(cell, number) for number, cell in enumerate(family, start=len(found))}
                measure_winners_at_neighbours(tuning for sweep in sweeps.values() for tuning in sweep.tunings)
            except DeviceLost as error:
                raise BadInput(f"{error}; what was measured is recorded: the same command goes on") from None
            found += [(str(cell), sweep.winners) for cell, sweep in sweeps.items()]
            del sweeps  # and the networks
            gc.collect()
            torch.cuda.empty_cache()
    _report(console, found, failures)
    console.print(f"Records: {where}", soft_wrap=True)


def _replay(console: Console, chosen: NetworkChoice, effort: Effort, path: Path) -> None:
    records = read_records(path)
    targets = [target for target in recorded_targets(records, chosen.model) if _fits(chosen, target)]
    if not targets:
        raise BadInput(f"--replay: {path} holds nothing of {chosen.model} like this, wants records of such a sweep")
    with SweepProgress(console) as progress:
        sweep = Sweep(RecordedTimes(records), STRATEGIES[effort.value], SweepRecords(None, {}, {}, {}), progress.show)
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
    shape = target.shape
    return (
        (not chosen.batches or shape.samples in chosen.batches)
        and (not chosen.dtypes or shape.dtype in chosen.dtypes)
        and (not chosen.classes or shape.classes in chosen.classes)
    )


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
