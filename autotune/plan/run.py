"""Runs ``exits="auto"`` on a network, and prints the table of what it measured, chose and why; for several GPUs advice.

A network that one GPU has no room for is then made on the CPU, and only advice is printed.
"""

import dataclasses
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ...model import AutoRunner
from ...model.auto.plan import Plan
from ...model.basics.bad_input import BadInput, one_line
from ..measuring.cells import OWN, Cell
from ..measuring.environment import release_memory, this_device
from ..measuring.options import check_patterns, chosen_patterns
from ..measuring.subject import Subject, build_subject, find_subject
from ..records.summaries import percentiles
from ..records.tables import RecordTable, percentiles_in_words, print_tables, wide_console
from .advice import advise
from .devices import Facts, measure_facts

_COLUMNS = ("runner", "host to answer, us", "device, us", "host/plain", "device/plain", "")
_CPU = torch.device("cpu")


def run_plan(
    model: str,
    cell: Cell | None,
    batches: Sequence[int],
    exits: Sequence[str],
    trunk: str,
    budget: str,
    plan_file: Path | None,
    gpus: int | None,
) -> None:
    """Measure and print a user's network, or, if there is a cell, that of a ResNet; the others are the options.

    Raises:
        BadInput: no CUDA device, no such factory or exit pattern, or a network that cannot be run like this.
    """
    console = wide_console()
    make = find_subject(model, may_be_on_cpu=gpus is not None) if cell is None else None
    device = this_device("plan", "")
    no_room = () if gpus is None else (torch.OutOfMemoryError,)
    if make is not None:
        subject = _own(make, model, device, no_room)
        patterns = exits or [OWN]
        check_patterns(patterns, [subject.cell])
    else:
        assert cell is not None
        with _one_line_of(cell):
            subject = _built(cell, device, no_room)
        patterns = exits
    device = subject.example.device if subject.example.is_cuda else device
    chosen = chosen_patterns(subject.cell, patterns)
    sizes = sorted(set(batches or [subject.cell.batch]))
    if plan_file is not None and len(chosen) != 1:
        raise BadInput(f"--plan: holds the plan of one exit pattern, got {', '.join(chosen)}; name one by --exits")
    facts: Facts | None = None
    for pattern in chosen:
        plans: Mapping[int, Plan] = {}
        if subject.example.device.type == device.type:
            with subject.exits(pattern), console.status(f"{subject.cell}; exits {pattern}"), _one_line_of(subject.cell):
                with suppress(*no_room):
                    plans = _plans(subject, make is None, sizes, trunk, budget, plan_file)
        for size, made in plans.items():
            measured = dataclasses.replace(subject.cell, batch=size)
            title = f"{measured}; trunk {trunk}; exits {pattern}"
            print_tables(console, [_table(title, made, subject.network.taps)])
        if gpus is not None:
            if not plans:
                subject = _moved(subject, _CPU)
            if facts is None:
                with console.status(f"{subject.cell}; segments"), _one_line_of(subject.cell):
                    release_memory()
                    kind = _trunk_to_cut(trunk, plans.values())
                    facts = measure_facts(subject.network, subject.example, device, sizes[-1], kind)
            advice = advise(facts._replace(best={size: _best(made) for size, made in plans.items()}), gpus, sizes)
            advice.show(console, f"{subject.cell.model} on {gpus} GPUs; exits {pattern}")
            if not plans:  # nor will there be room with other exits
                break


def _plans(
    subject: Subject, all_inputs: bool, sizes: Sequence[int], trunk: str, budget: str, plan_file: Path | None
) -> Mapping[int, Plan]:
    """Measure all runners on one input of a subject or on many, by batch size."""
    x = subject.samples_for_auto if all_inputs else subject.example
    runner = AutoRunner(subject.network, x, batch_sizes=sizes, trunk=trunk, budget=budget, plan=plan_file)
    runner.close()
    return runner.plans


def _own(
    make: Callable[[], Subject], model: str, device: torch.device, no_room: tuple[type[Exception], ...]
) -> Subject:
    """Make a user's network; of one on the CPU, which ``no_room`` allows, move it if there is room."""
    try:
        subject = make()
    except no_room as error:
        raise BadInput(f"MODEL: {model}: {one_line(error)}; wants it on the CPU, as one GPU has no room") from None
    with suppress(*no_room):
        return subject if subject.example.device.type == device.type else _moved(subject, device)
    return _moved(subject, _CPU)


def _built(cell: Cell, device: torch.device, no_room: tuple[type[Exception], ...]) -> Subject:
    """Make a ResNet, on the CPU if there is no room and ``no_room`` is caught."""
    with suppress(*no_room):
        return build_subject(cell, device)
    release_memory()
    return build_subject(cell, _CPU)


def _moved(subject: Subject, device: torch.device) -> Subject:
    inputs = tuple(x.to(device) for x in subject.inputs)
    return dataclasses.replace(subject, network=subject.network.to(device), inputs=inputs)


def _trunk_to_cut(asked: str, plans: Collection[Plan]) -> str:
    """Return "cudnn" where a trunk that is not as it is was asked for, or is faster: of those it can be cut."""
    kinds = {made.chosen.trunk for made in plans} or {asked}
    return "as_is" if kinds <= {"as_is", "auto"} else "cudnn"


def _best(made: Plan) -> tuple[str, float]:
    """Return the name and the microseconds of the runner that was chosen."""
    return made.chosen.name, statistics.median(made.times[made.chosen.name].host)


@contextmanager
def _one_line_of(cell: Cell) -> Iterator[None]:
    """Tell in one line of a layer that cannot be captured, no memory, or a folder as plan file."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"{cell}: {' '.join(str(error).split())}") from None


def _table(title: str, made: Plan, taps: Sequence[str]) -> RecordTable:
    """Return what was measured, with the choice and its reason below."""
    rows = []
    for name, times in made.times.items():
        marks = [mark for mark, marked in (("chosen", made.chosen.name), ("plain graph", made.plain)) if name == marked]
        pairs = zip(times, made.times[made.plain], strict=True)
        ratios = (f"{statistics.median(us) / statistics.median(plain_us):.3f}" for us, plain_us in pairs)
        us = (percentiles_in_words(percentiles(us)._asdict()) for us in times)
        rows.append((name, *us, *ratios, ", ".join(marks)))
    trunks = [f"{kind} {statistics.median(us.host):,.1f}" for kind, us in made.trunk_times.items()]
    leave = ", ".join(f"{share:.0%} {where}" for share, where in zip(made.shares, (*taps, "classifier"), strict=True))
    remarks = [
        *([f"The plain graph by trunk, us: {', '.join(trunks)}."] if trunks else []),
        *(f"{name} left out: {why}" for name, why in made.left_out.items()),
        f"Samples leave at: {leave}.",
        f"{made.chosen.name[:1].upper()}{made.chosen.name[1:]}: {made.reason()}.",
        f"From the plan file, measured at {made.utc}." if made.from_file else "Measured now.",
        "",
    ]
    return RecordTable(title, _COLUMNS, 1, rows, remarks)
