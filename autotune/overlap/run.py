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
from .footprints import FOOTPRINT, footprint_records, measure_footprints
from .measure import OverlapMeasured, measure_overlap
from .records import KIND, failed_record, overlap_records
from .tables import footprint_tables, overlap_tables


def run_overlap(chosen: NetworkChoice, out: Path | None, *, footprints: bool) -> None:
    """Measure the networks chosen, or the footprints of their heads, and print tables of them.

    Raises:
        BadInput: no CUDA device, no such network, or one that could not be measured.
    """
    kind = FOOTPRINT if footprints else KIND
    console, networks = wide_console(), find_networks(kind, chosen.own, chosen.cells, out)
    found: list[Record] = []
    reasons: list[str] = []
    with SweepProgress(console) as progress:
        for number, cell in enumerate(networks.cells):
            begins = progress.of_network(cell, number, len(networks.cells))
            begins("building", 0.0)
            try:
                subject = networks.subject(cell)
                measured = measure_footprints(subject, begins) if footprints else measure_overlap(subject, begins)
            except (RuntimeError, ValueError) as error:  # no memory, a wrong answer, a trace that holds too little
                why = error.__cause__ if isinstance(error, VariantFailed) and error.__cause__ else error
                reasons.append(str(Failure.of(why)))
                records = [failed_record(kind, cell, reasons[-1], networks.environment)]
            else:
                around = {**networks.environment, "clocks": clocks(networks.device)}
                if isinstance(measured, OverlapMeasured):
                    records = overlap_records(cell, measured, around)
                else:
                    records = footprint_records(cell, measured, around)
            for record in records:
                append_record(networks.where, record)
            found += records
            release_memory()
    print_tables(console, (footprint_tables if footprints else overlap_tables)(found), networks.where)
    if reasons:
        count = f"{len(reasons)} of {len(networks.cells)}"
        raise BadInput(f"{count} networks could not be measured, the first: {reasons[0]}")
