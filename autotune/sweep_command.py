"""The command ``auxhead-tune sweep``."""

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..kernels.kernel_hash import kernel_hash
from ..model.bad_input import BadInput
from ..model.one_line_errors import one_line_errors
from .bench import DeviceLost
from .environment import environment
from .head_timing import HeadTiming
from .measurer import Measurer, Target
from .network_choice import Batches, Classes, Dtypes, Model, NetworkChoice, Placements
from .record import BadRecord, default_path, read_records
from .replay import ReplayMeasurer, recorded_targets
from .strategies import STRATEGIES
from .subject import build_subject
from .sweep import Outcome, Status, Sweep
from .sweep_progress import WIDTH, SweepProgress, failures_in_words, outcome_table
from .sweep_records import Book


class Effort(str, Enum):
    """How much is tried."""

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

    Options that choose networks may be given several times. What is recorded is not measured again: a run that was
    stopped, at whatever moment, goes on where it was.
    """
    console = Console()
    console = console if console.is_terminal else Console(width=max(console.width, WIDTH))
    chosen = NetworkChoice.of(model, batch, dtype, classes, placement)
    with one_line_errors(BadRecord):
        if replay is not None:
            if out is not None:
                raise BadInput(f"--out: got {out} with --replay, wants none: nothing is measured")
            _replay(console, chosen, effort, replay)
        else:
            _measure(console, chosen, effort, out)


def _measure(console: Console, chosen: NetworkChoice, effort: Effort, out: Path | None) -> None:
    if not torch.cuda.is_available():
        raise BadInput("sweep: torch sees no CUDA device here, wants one; --replay needs none")
    device = torch.device("cuda", torch.cuda.current_device())
    own = chosen.own()
    cells = [own.cell] if own is not None else chosen.cells()
    where = out or default_path("sweep", torch.cuda.get_device_name(device))
    found: list[tuple[str, list[Outcome]]] = []
    failures: Counter[str] = Counter()
    with SweepProgress(console) as progress:
        for number, cell in enumerate(cells):

            def show(status: Status, before: int = number) -> None:
                progress.show(status._replace(done=(before + status.done) / len(cells)))

            show(Status(0.0, f"{cell}: building", "", failures))
            measurer = HeadTiming(own or build_subject(cell, device))
            protocol = {"kernel": kernel_hash(), **measurer.protocol}
            book = Book(where, environment(device), protocol, measurer.of_network)
            try:
                found.append((str(cell), _run(measurer, measurer.targets, effort, book, show, failures)))
            except DeviceLost as error:
                raise BadInput(f"{error}; what was measured is recorded: the same command goes on") from None
            del measurer
            gc.collect()
            torch.cuda.empty_cache()
    _report(console, found, failures)
    console.print(f"Records: {where}", highlight=False, soft_wrap=True)


def _replay(console: Console, chosen: NetworkChoice, effort: Effort, path: Path) -> None:
    records = read_records(path)
    targets = [target for target in recorded_targets(records, chosen.model) if chosen.fits(target)]
    if not targets:
        raise BadInput(f"--replay: {path} holds nothing of {chosen.model} like this, wants records of such a sweep")
    failures: Counter[str] = Counter()
    with SweepProgress(console) as progress:
        book = Book(None, {}, {}, {})
        outcomes = _run(ReplayMeasurer(records), targets, effort, book, progress.show, failures)
    by_network: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        shape = outcome.target.shape
        title = f"{chosen.model} {shape.dtype}, batch {shape.samples}, {shape.classes} classes, from {path}"
        by_network.setdefault(title, []).append(outcome)
    _report(console, list(by_network.items()), failures)


def _run(
    measurer: Measurer,
    targets: Sequence[Target],
    effort: Effort,
    book: Book,
    show: Callable[[Status], None],
    failures: Counter[str],
) -> list[Outcome]:
    return Sweep(measurer, STRATEGIES[effort.value], book, show, failures).run(targets)


def _report(console: Console, found: Sequence[tuple[str, Sequence[Outcome]]], failures: Counter[str]) -> None:
    for title, outcomes in found:
        console.print(outcome_table(title, outcomes))
    if failures:
        console.print(f"Not timed: {failures_in_words(failures)}", highlight=False, markup=False, soft_wrap=True)
