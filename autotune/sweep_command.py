"""The command ``auxhead-tune sweep``."""

import dataclasses
import gc
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
from .cells import STAGES, Cell, Dtype, Placement, resnet_cell
from .environment import environment
from .exchange import exchange_winners
from .head_timing import HeadTiming
from .measurer import Target
from .outcome import Outcome
from .outcome_tables import outcome_table, summary
from .record import BadRecord, read_records
from .replay import ReplayMeasurer, recorded_targets
from .strategies import STRATEGIES
from .subject import Subject, build_subject, is_factory, load_subject
from .sweep import Status, Sweep
from .sweep_progress import SweepProgress, failures_in_words
from .sweep_records import Book
from .tables import as_rich, wide_console


class Effort(str, Enum):
    """How much is tried."""

    quick = "quick"
    full = "full"


def sweep(
    model: Annotated[
        str,
        typer.Argument(
            help="resnet18, resnet34, resnet50, or your own: package.module:function, which takes nothing and returns "
            "(EarlyExitNetwork in eval mode, example batch), both on the GPU.",
            show_default=False,
        ),
    ],
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default="1")] = None,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="Of weights and inputs.", show_default="float16")] = None,
    classes: Annotated[list[int] | None, typer.Option(min=1, help="Of every exit.", show_default="1000")] = None,
    placement: Annotated[
        list[Placement] | None,
        typer.Option(help="A head after every block, every stage, or every stage but the last.", show_default="stages"),
    ] = None,
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
    dtypes, placements = [one.value for one in dtype or []], [one.value for one in placement or []]
    chosen = _Chosen(model, batch or [], dtypes, classes or [], placements)
    with one_line_errors(BadRecord):
        if replay is not None:
            if out is not None:
                raise BadInput(f"--out: got {out} with --replay, wants none: nothing is measured")
            _replay(console, chosen, effort, replay)
        else:
            _measure(console, chosen, effort, out)


@dataclass(frozen=True)
class _Chosen:
    """The networks that the options choose."""

    model: str
    batches: Sequence[int]
    dtypes: Sequence[str]
    classes: Sequence[int]
    placements: Sequence[str]

    def cells(self) -> list[Cell]:
        """Return those of torchvision's networks."""
        if self.model not in STAGES:
            raise BadInput(f"MODEL: got {self.model}, wants one of {', '.join(STAGES)} or package.module:function")
        return [
            resnet_cell(self.model, dtype, batch, classes, placement)
            for dtype in self.dtypes or ["float16"]
            for batch in self.batches or [1]
            for classes in self.classes or [1000]
            for placement in self.placements or ["stages"]
        ]

    def own(self) -> Subject:
        """Return the user's."""
        given = (
            ("batch", self.batches),
            ("dtype", self.dtypes),
            ("classes", self.classes),
            ("placement", self.placements),
        )
        for option, values in given:
            if values:
                raise BadInput(f"--{option}: is that of the network which {self.model} returns, wants no value here")
        sys.path.insert(0, "")  # as `python -m` does: the user's module lies where the command is run
        return load_subject(self.model)

    def fits(self, target: Target) -> bool:
        """Whether a recorded target is of what was asked for; where heads were is not recorded."""
        shape = target.shape
        asked: tuple[tuple[object, Sequence[object]], ...] = (
            (shape.samples, self.batches),
            (shape.dtype, self.dtypes),
            (shape.classes, self.classes),
        )
        return all(not values or value in values for value, values in asked)


def _measure(console: Console, chosen: _Chosen, effort: Effort, out: Path | None) -> None:
    if not torch.cuda.is_available():
        raise BadInput("sweep: torch sees no CUDA device here, wants one; --replay needs none")
    device = torch.device("cuda", torch.cuda.current_device())
    own = chosen.own() if is_factory(chosen.model) else None
    cells = [own.cell] if own is not None else chosen.cells()
    gpu = torch.cuda.get_device_name(device)
    where = out or Path("autotune-records") / f"sweep-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.jsonl"
    found: list[tuple[str, list[Outcome]]] = []
    failures: Counter[str] = Counter()
    with SweepProgress(console) as progress:
        for family in _families(cells):
            sweeps: dict[str, Sweep] = {}
            try:
                for cell in family:
                    before = len(found) + len(sweeps)

                    def show(status: Status, before: int = before) -> None:
                        progress.show(status._replace(done=(before + status.done) / len(cells)))

                    show(Status(0.0, f"{cell}: building", "", failures))
                    measurer = HeadTiming(own or build_subject(cell, device))
                    protocol = {"kernel": kernel_hash(), **measurer.protocol}
                    book = Book(where, environment(device), protocol, measurer.of_network)
                    sweeps[str(cell)] = Sweep(measurer, STRATEGIES[effort.value], book, show, failures)
                    sweeps[str(cell)].run(measurer.targets)
                exchange_winners(tuning for sweep in sweeps.values() for tuning in sweep.tunings)
            except DeviceLost as error:
                raise BadInput(f"{error}; what was measured is recorded: the same command goes on") from None
            found += [(name, sweep.outcomes) for name, sweep in sweeps.items()]
            del measurer, sweeps
            gc.collect()
            torch.cuda.empty_cache()
    _report(console, found, failures)
    console.print(f"Records: {where}", highlight=False, soft_wrap=True)


def _replay(console: Console, chosen: _Chosen, effort: Effort, path: Path) -> None:
    records = read_records(path)
    targets = [target for target in recorded_targets(records, chosen.model) if chosen.fits(target)]
    if not targets:
        raise BadInput(f"--replay: {path} holds nothing of {chosen.model} like this, wants records of such a sweep")
    failures: Counter[str] = Counter()
    with SweepProgress(console) as progress:
        sweep = Sweep(
            ReplayMeasurer(records), STRATEGIES[effort.value], Book(None, {}, {}, {}), progress.show, failures
        )
        sweep.run(targets)
        exchange_winners(sweep.tunings)
    by_network: dict[str, list[Outcome]] = {}
    for outcome in sweep.outcomes:
        shape = outcome.target.shape
        title = f"{chosen.model} {shape.dtype}, batch {shape.samples}, {shape.classes} classes, from {path}"
        by_network.setdefault(title, []).append(outcome)
    _report(console, list(by_network.items()), failures)


def _families(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Group cells that differ in the batch size alone."""
    found: dict[Cell, list[Cell]] = {}
    for cell in cells:
        found.setdefault(dataclasses.replace(cell, batch=0), []).append(cell)
    return list(found.values())


def _report(console: Console, found: Sequence[tuple[str, Sequence[Outcome]]], failures: Counter[str]) -> None:
    for title, outcomes in found:
        console.print(as_rich(outcome_table(title, outcomes)))
    for line in summary([outcome for _, outcomes in found for outcome in outcomes]):
        console.print(line, highlight=False, soft_wrap=True)
    if failures:
        console.print(f"Not timed: {failures_in_words(failures)}", highlight=False, markup=False, soft_wrap=True)
