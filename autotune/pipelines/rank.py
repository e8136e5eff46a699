"""Program of each process of the benchmark, under torchrun: measures a plan, its argument; the first one records."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
import typer

from ...model.commands.console import plain_console
from ...model.commands.errors import one_line_errors
from ...model.processes.process_group import joined_processes
from ..measuring.environment import clocks, environment
from ..measuring.progress import SweepProgress
from ..records.record import BadRecord, Record, append_record
from .measure import Results, measure_pipelines
from .plan import PipelinePlan
from .records import pipeline_records, timeline_records


def main(text: str) -> None:
    """Measure a plan, as JSON."""
    plan, rank = PipelinePlan.from_json(text), int(os.environ["RANK"])
    with (
        one_line_errors(BadRecord),
        joined_processes(_backend, lambda: _own_device(plan.device), {"plan": text}) as device,
    ):
        if rank != 0:
            measure_pipelines(plan, device, rank, lambda what, share: None, lambda results: None)
            return
        of_device = environment(device)

        def append(records: Iterable[Record]) -> None:
            for record in records:
                append_record(Path(plan.out), record)

        def timed(results: Results) -> None:
            append(pipeline_records(plan, results, {**of_device, "clocks": clocks(device)}))

        with SweepProgress(plain_console()) as progress:
            results = measure_pipelines(plan, device, rank, progress.of_network(plan.cell, 0, 1), timed)
        append(timeline_records(plan, results, of_device))


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _own_device(kind: str) -> torch.device:
    """Return this process's device, which is the current one from now on."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    typer.run(main)
