"""Networks that options choose: found before the device is asked for, made on it, measured one after another."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...model.basics.bad_input import BadInput
from ..records.record import Record, append_record, records_path
from ..records.tables import RecordTable, print_tables, wide_console
from .cells import Cell
from .environment import clocks, environment, release_memory, this_device
from .failures import Failure
from .options import NetworkChoice, is_factory
from .progress import Begins, SweepProgress
from .subject import Subject, build_subject, find_subject
from .timers import VariantFailed


def find_networks(chosen: NetworkChoice) -> Callable[[], tuple[Subject | None, list[Cell]]]:
    """Find what was chosen; a name that is wrong is told whatever the machine lacks.

    Returns:
        A function that returns the user's network, if it is one, and the cells of all; raises as ``find_subject``'s.

    Raises:
        BadInput: there is no such function of the user's.
    """
    if not is_factory(chosen.model):
        return lambda: (None, chosen.cells())
    make = find_subject(chosen.model)

    def own() -> tuple[Subject, list[Cell]]:
        subject = make()
        return subject, [subject.cell]

    return own


#: The measurements of one network.
Measured = TypeVar("Measured")


def measure_networks(
    kind: str,
    chosen: NetworkChoice,
    out: Path | None,
    measure: Callable[[Subject, Begins], Measured],
    finish: Callable[[Cell, Measured, Mapping[str, Any]], list[Record]],
    failed: Callable[[Cell, str, Mapping[str, Any]], Record],
    tables: Callable[[Iterable[Record]], list[RecordTable]],
) -> None:
    """Measure networks, append their records, and print tables of them.

    Args:
        kind: the kind of the records, which is the command's name, too.
        chosen: the networks.
        out: file of the records; None for the usual one.
        measure: measures one network on a CUDA device. RuntimeError and ValueError are recorded as failures.
        finish: makes records of cell, measurements and environment.
        failed: makes the record of a failure of cell, reason and environment.
        tables: makes tables of records.

    Raises:
        BadInput: no CUDA device, no such network, or a failure.
    """
    console = wide_console()
    make = find_networks(chosen)
    device = this_device(kind)
    where = records_path(out, kind, torch.cuda.get_device_name(device))
    own, cells = make()
    of_device = environment(device)
    found: list[Record] = []
    reasons: list[str] = []
    with SweepProgress(console) as progress:
        for number, cell in enumerate(cells):
            begins = progress.of_network(cell, number, len(cells))
            begins("building", 0.0)
            try:
                measured = measure(own or build_subject(cell, device), begins)
            except (RuntimeError, ValueError) as error:  # no memory, a wrong answer, a trace that holds too little
                why = error.__cause__ if isinstance(error, VariantFailed) and error.__cause__ else error
                reasons.append(str(Failure.of(why)))
                records = [failed(cell, reasons[-1], of_device)]
            else:
                records = finish(cell, measured, {**of_device, "clocks": clocks(device)})
            for record in records:
                append_record(where, record)
            found += records
            release_memory()
    print_tables(console, tables(found), where)
    if reasons:
        raise BadInput(f"{len(reasons)} of {len(cells)} networks could not be measured, the first: {reasons[0]}")
