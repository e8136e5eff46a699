"""Runs the benchmark over several GPUs: a process for each, in which this module measures; the first one records."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.console import plain_console
from ...model.commands.errors import one_line_errors
from ...model.processes.process_group import joined_processes
from ..measuring.cells import resnet_cell
from ..measuring.environment import clocks, environment
from ..measuring.progress import SweepProgress
from ..records.record import BadRecord, Record, append_record, is_settled, read_records, records_path
from ..records.tables import print_tables, wide_console
from .measure import KIND, Results, measure_pipelines, pipeline_records, timeline_records
from .tables import pipeline_tables
from .variants import PipelineOptions, cases_of

#: The first and second GPU.
_DEVICES = 2


def run_pipelines(
    model: str,
    *,
    devices: int,
    dtype: str,
    classes: int,
    batches: Sequence[int],
    split_sizes: Sequence[int],
    rounds: int,
    out: Path | None,
    fresh: bool,
) -> None:
    """Measure, record and print; the arguments are the options of the command.

    Raises:
        BadInput: too few CUDA devices, or a process that failed.
        BadRecord: ``out`` cannot be read.
    """
    console = wide_console()
    if devices != _DEVICES:
        raise BadInput(f"--devices: got {devices}, wants 1 or {_DEVICES}")
    there = torch.cuda.device_count()
    if there < devices:
        raise BadInput(f"bench: torch sees {there} CUDA devices here, wants {devices}; `auxhead-tune table` needs none")
    where = records_path(out, KIND, torch.cuda.get_device_name(0))
    cell = resnet_cell(model, dtype, max(batches), classes, "stages")
    options = PipelineOptions(cell, tuple(batches), tuple(split_sizes), rounds, str(where))
    if fresh or not _is_measured(options, where):
        measure_in_processes(options)
    asked = [options.cell_of(batch).as_json() for batch in options.batches]
    print_tables(console, pipeline_tables(one for one in read_records(where) if one.cell in asked), where)


def _is_measured(options: PipelineOptions, where: Path) -> bool:
    """Return whether records have all cases, measured under the same versions with as many rounds."""
    found = environment(torch.device("cuda", 0))
    records = read_records(where) if where.exists() else []
    settled = [
        (one.cell, one.variant) for one in records if one.kind == KIND and is_settled(one, found, options.rounds)
    ]
    return all((options.cell_of(case.batch).as_json(), case.name) in settled for case in cases_of(options))


def measure_in_processes(options: PipelineOptions) -> None:
    """Measure in processes that torchrun starts, which append records.

    Raises:
        BadInput: one of them failed; it has said why.
    """
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes),
        "--module", f"{__package__}.run", options.to_json(),
    ]  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // options.processes))
    done = subprocess.run(command, env={"OMP_NUM_THREADS": threads, **os.environ}, check=False)
    if done.returncode != 0:
        raise BadInput(f"bench: a process of the pipeline ended with status {done.returncode}; it said why, above")


def main(text: str) -> None:
    """Measure what is asked for, as JSON, as one of the processes."""
    options, rank = PipelineOptions.from_json(text), int(os.environ["RANK"])

    def append(records: Iterable[Record]) -> None:
        for record in records:
            append_record(Path(options.out), record)

    with (
        one_line_errors(BadRecord),
        joined_processes(_backend, lambda: _own_device(options.device), {"options": text}) as device,
    ):
        if rank != 0:
            measure_pipelines(options, device, rank, lambda what, share: None, lambda results: None)
            return
        of_device = environment(device)

        def timed(results: Results) -> None:
            append(pipeline_records(options, results, {**of_device, "clocks": clocks(device)}))

        with SweepProgress(plain_console()) as progress:
            results = measure_pipelines(options, device, rank, progress.of_network(options.cell, 0, 1), timed)
        append(timeline_records(options, results, of_device))


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
