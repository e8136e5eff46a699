"""Runs the benchmark over several GPUs: starts a process for each, and prints the tables of what they recorded."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from ...model.basics.bad_input import BadInput
from ..measuring.cells import resnet_cell
from ..measuring.environment import environment
from ..records.record import is_settled, read_records, records_path
from ..records.tables import print_tables, wide_console
from .plan import PipelinePlan
from .records import KIND
from .tables import pipeline_tables
from .variants import cases_of

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
    """Measure, record and print; the arguments are the options.

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
    plan = PipelinePlan(cell, tuple(batches), tuple(split_sizes), rounds, str(where))
    if fresh or not _is_measured(plan, where):
        measure_in_processes(plan)
    of_plan = [plan.cell_of(batch).as_json() for batch in plan.batches]
    print_tables(console, pipeline_tables(one for one in read_records(where) if one.cell in of_plan), where)


def measure_in_processes(plan: PipelinePlan) -> None:
    """Measure a plan in processes that torchrun starts, which append records.

    Raises:
        BadInput: one of them failed; it has said why.
    """
    Path(plan.out).parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.processes),
        "--module", f"{__package__}.rank", plan.to_json(),
    ]  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // plan.processes))
    done = subprocess.run(command, env={"OMP_NUM_THREADS": threads, **os.environ}, check=False)
    if done.returncode != 0:
        raise BadInput(f"bench: a process of the pipeline ended with status {done.returncode}; it said why, above")


def _is_measured(plan: PipelinePlan, where: Path) -> bool:
    """Return whether records have all cases, measured under the same versions with as many rounds."""
    found = environment(torch.device("cuda", 0))
    records = read_records(where) if where.exists() else []
    settled = [(one.cell, one.variant) for one in records if one.kind == KIND and is_settled(one, found, plan.rounds)]
    return all((plan.cell_of(case.batch).as_json(), case.name) in settled for case in cases_of(plan))
