"""The command ``auxhead-tune retune``."""

import gc
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer

from ...kernels.kernel_hash import kernel_hash
from ...model.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..heads.compile_ahead import CompileAhead
from ..heads.measure import HeadTiming
from ..measuring.environment import environment, this_device
from ..measuring.failures import DeviceLost
from ..measuring.interrupts import resumable
from ..measuring.options import Batches, Classes, Dtypes, Model, NetworkChoice, Placements
from ..measuring.progress import Status, SweepProgress
from ..measuring.subject import build_subject
from ..records.record import BadRecord, Record, append_record, read_records, records_path
from ..records.tables import print_tables, wide_console
from ..sweep.records import Book
from ..sweep.search import alone_only
from ..sweep.strategies import STRATEGIES
from .agreement import KIND, agreement_tables
from .measure import retune as retune_targets


def retune(
    model: Model,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    times: Annotated[int, typer.Option(min=2, help="Tunings of each head.")] = 10,
    in_situ: Annotated[
        bool, typer.Option("--in-situ", help="Tune in the captured network, too, which takes several times as long.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="What it came to is appended here, measurements to files beside it, one for each tuning.",
            show_default="autotune-records/retune-DEVICE.jsonl",
        ),
    ] = None,
) -> None:
    """Tune heads afresh, time and again, and say how often it comes to the same configuration or to one tied with it.

    Each tuning is a quick sweep that knows nothing of the others. What differs is compared in a run of its own. A run
    that was stopped goes on where it was.
    """
    console = wide_console()
    chosen = NetworkChoice.of(model, batch, dtype, classes, placement)
    with one_line_errors(BadRecord), resumable():
        device = this_device(KIND)
        own, cells = chosen.networks()
        where = records_path(out, KIND, torch.cuda.get_device_name(device))
        search = STRATEGIES["quick"] if in_situ else alone_only(STRATEGIES["quick"])
        names = [*(f"{number:02}" for number in range(1, times + 1)), "compared"]
        kept = []
        with SweepProgress(console) as progress, CompileAhead.beside(device) as ahead:
            for number, cell in enumerate(cells):

                def show(status: Status, before: int = number) -> None:
                    progress.show(status._replace(done=(before + status.done) / len(cells)))

                show(Status(0.0, f"{cell}: building", "", Counter()))
                measurer = HeadTiming(own or build_subject(cell, device), ahead=ahead)
                protocol = {"kernel": kernel_hash(), **measurer.protocol}
                books = [
                    Book(where.with_stem(f"{where.stem}-{name}"), environment(device), protocol, measurer.of_network)
                    for name in names
                ]
                try:
                    found = retune_targets(measurer, measurer.targets, search, books, show)
                except DeviceLost as error:
                    raise BadInput(f"{error}; what was measured is recorded: the same command goes on") from None
                kept += [_kept(where, agreement.record(books[0])) for agreement in found]
                del measurer
                gc.collect()
                torch.cuda.empty_cache()
        print_tables(console, agreement_tables(kept))
        console.print(f"Records: {where}", soft_wrap=True)


def _kept(path: Path, record: Record) -> Record:
    """Append a record, unless one that says the same is there."""
    known = read_records(path) if path.exists() else []
    if not any(
        (one.key, one.environment_key, one.protocol, one.paired)
        == (record.key, record.environment_key, record.protocol, record.paired)
        for one in known
    ):
        append_record(path, record)
    return record
