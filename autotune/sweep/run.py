"""Runs a sweep: heads that differ in the batch size alone together; then prints what their records decide."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.kernel_hash import kernel_hash
from ...model.basics.bad_input import BadInput
from ..measuring.cells import Cell
from ..measuring.compile_pool import CompilePool
from ..measuring.environment import release_memory
from ..measuring.failures import DeviceLost
from ..measuring.head_timing import HeadTiming
from ..measuring.networks import Networks, find_networks
from ..measuring.options import NetworkChoice
from ..measuring.progress import Status, SweepProgress, failures_in_words
from ..measuring.subject import Subject
from ..records.decisions import sweep_records
from ..records.record import grouped, read_records
from ..records.tables import print_tables, wide_console
from .broad import BROAD, Family, family_name, made
from .measure import Sweep, measure_winners_at_neighbours
from .records import SweepRecords
from .search import STRATEGIES, TABLES
from .winners import shape_of, sweep_tables


class _Part(NamedTuple):
    """Heads that are made, measured and given up together: those of a network, or of the broad set one."""

    name: str
    measurer: Callable[[CompilePool], HeadTiming]


def run_sweep(chosen: NetworkChoice | None, strategy: str, out: Path | None) -> None:
    """Measure what the strategy named ``strategy`` asks for of networks, or of the broad set, and print the winners.

    Raises:
        BadInput: no CUDA device, no such network, heads of more than one layer, or a device that was lost.
        BadRecord: ``out`` cannot be read.
    """
    console = wide_console()
    own, cells = (None, []) if chosen is None else (chosen.own, chosen.cells)
    networks = find_networks("sweep", own, cells, out)
    if networks.own is not None:
        _check_heads(networks.own)
    families = [[_broad(heads, networks)] for heads in BROAD] if chosen is None else _families(networks)
    count = sum(map(len, families))
    asked: set[HeadShape] = set()
    done = 0
    failures: Counter[str] = Counter()
    capability = torch.cuda.get_device_capability(networks.device)
    with CompilePool(capability) as pool, SweepProgress(console) as progress:

        def swept(part: _Part, number: int) -> Sweep:
            def show(status: Status) -> None:
                progress.show(status._replace(done=(number + status.done) / count))

            show(Status(0.0, f"{part.name}: building", "", failures))
            measurer = part.measurer(pool)
            protocol = {"kernel": kernel_hash(), **measurer.protocol}
            records = SweepRecords(networks.where, networks.environment, protocol)
            sweep = Sweep(measurer, STRATEGIES[strategy], records, show, failures)
            asked.update(target.shape for target in measurer.targets)
            sweep.run(measurer.targets)
            return sweep

        for family in families:
            try:
                sweeps = [swept(part, number) for number, part in enumerate(family, start=done)]
                if strategy != TABLES:
                    measure_winners_at_neighbours(tuning for sweep in sweeps for tuning in sweep.tunings)
            except DeviceLost as error:
                raise BadInput(f"{error}; what was measured is recorded: the same command goes on") from None
            done += len(family)
            del sweeps  # and the heads
            release_memory()
    found = [record for record in sweep_records(read_records(networks.where)) if shape_of(record) in asked]
    print_tables(console, sweep_tables(found))
    if failures:
        console.print(f"Not timed: {failures_in_words(failures)}", soft_wrap=True)
    console.print(f"Records: {networks.where}", soft_wrap=True)


def _check_heads(subject: Subject) -> None:
    """Refuse heads that tables do not have: what a table says of one linear layer is fitted to those of several."""
    for tap, head in zip(subject.network.taps, subject.heads, strict=True):
        if head.hidden is not None:
            rows = head.hidden_layers().rows(head.num_classes)
            raise BadInput(
                f"MODEL: the head of {tap} in {subject.cell.model} has layers before its last one, wants one linear "
                f"layer, FusedAuxHead(None, {rows}) in its place: it is launched by what a table says of that"
            )


def _broad(family: Family, networks: Networks) -> _Part:
    device = networks.device
    return _Part(family_name(family), lambda pool: HeadTiming(device, made(family, device), pool))


def _families(networks: Networks) -> list[list[_Part]]:
    """Group networks that differ in the batch size alone."""

    def part(cell: Cell) -> _Part:
        return _Part(str(cell), lambda pool: HeadTiming.of_network(networks.subject(cell), pool=pool))

    families = grouped(networks.cells, lambda cell: dataclasses.replace(cell, batch=0))
    return [list(map(part, cells)) for cells in families.values()]
