"""Runs ``auxhead-tune overlap``: measures network after network, keeps the records, and prints their tables."""

from pathlib import Path

from ...model.basics.bad_input import BadInput
from ..measuring.environment import clocks, release_memory
from ..measuring.failures import Failure
from ..measuring.networks import find_networks
from ..measuring.options import NetworkChoice
from ..measuring.progress import SweepProgress
from ..measuring.timers import VariantFailed
from ..records.record import Record, append_record
from ..records.tables import print_tables, wide_console
from .measure import measure_overlap
from .records import KIND, failed_record, overlap_records
from .tables import overlap_tables


def run_overlap(chosen: NetworkChoice, out: Path | None) -> None:
    """Measure the networks chosen, and print tables of them.

    Raises:
        BadInput: no CUDA device, no such network, or one that could not be measured.
    """
    console, networks = wide_console(), find_networks(KIND, chosen.own, chosen.cells, out)
    found: list[Record] = []
    reasons: list[str] = []
    with SweepProgress(console) as progress:
        for number, cell in enumerate(networks.cells):
            begins = progress.of_network(cell, number, len(networks.cells))
            begins("building", 0.0)
            try:
                measured = measure_overlap(networks.subject(cell), begins)
            except (RuntimeError, ValueError) as error:  # no memory, a wrong answer, a trace that holds too little
                why = error.__cause__ if isinstance(error, VariantFailed) and error.__cause__ else error
                reasons.append(str(Failure.of(why)))
                records = [failed_record(cell, reasons[-1], networks.environment)]
            else:
                around = {**networks.environment, "clocks": clocks(networks.device)}
                records = overlap_records(cell, measured, around)
            for record in records:
                append_record(networks.where, record)
            found += records
            release_memory()
    print_tables(console, overlap_tables(found), networks.where)
    if reasons:
        count = f"{len(reasons)} of {len(networks.cells)}"
        raise BadInput(f"{count} networks could not be measured, the first: {reasons[0]}")
