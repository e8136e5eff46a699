"""Measures the zoo: a process for each network and batch, with caches of its own.

For a network's smallest batch there is a second process, which finds those caches.
"""

import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...model.basics.bad_input import BadInput
from ..bench.measure import BenchOptions, PatternRun, run_cell
from ..bench.variants import MAX_AUTOTUNE_BATCHES, VariantCaptures, catalogue
from ..measuring.cells import NEVER
from ..measuring.environment import environment, this_device
from ..measuring.failures import Failure
from ..measuring.options import is_factory
from ..records.record import Record, append_record, is_settled, read_records, records_path
from ..records.tables import print_tables, wide_console
from ..records.zoo import AGAIN, COMPILED, DEFAULT, GRAPH, KIND, MAX_AUTOTUNE
from .networks import LIBRARIES, check_networks, zoo_subject
from .tables import zoo_tables

#: Timed rounds of each variant.
ROUNDS = 20
#: What each cell is measured with, the runner first: with nothing compiled; and of a network's smallest batch eagerly,
#: and how soon the next process answers.
VARIANTS = (DEFAULT, COMPILED, GRAPH)
EAGER_VARIANTS = ("eager-bare@as_is", "eager-naive-item@as_is", "eager@as_is", "eager-stop@as_is")


def run_zoo(models: list[str], batches: Sequence[int], max_autotune: bool, out: Path | None) -> None:
    """Measure networks of these names, all if there is none, and print the table.

    Raises:
        BadInput: no CUDA device, a name that is none, or a network that could not be measured.
        BadRecord: ``out`` cannot be read.
    """
    check_networks(models)
    device = this_device("zoo")
    where = records_path(out, KIND, torch.cuda.get_device_name(device))
    console, here = wide_console(), environment(device)
    cells = [(model, batch) for model in models or LIBRARIES for batch in ([0] if is_factory(model) else batches)]
    failed: list[str] = []
    for number, (model, batch) in enumerate(cells, start=1):
        of_smallest = batch in (0, min(batches))
        wanted = (*VARIANTS, *(EAGER_VARIANTS if of_smallest else ()))
        if max_autotune and batch in MAX_AUTOTUNE_BATCHES:
            wanted += (MAX_AUTOTUNE,)
        if _is_measured(model, batch, (*wanted, AGAIN) if of_smallest else wanted, where, here):
            continue
        what = f"{model}, batch {batch}" if batch else model
        console.print(f"{number} of {len(cells)}: {what}", soft_wrap=True)
        with tempfile.TemporaryDirectory(prefix="auxhead-zoo-") as caches:
            for measure in (_measure, *([_answer_again] if of_smallest else [])):
                if not _ran(measure, model, batch, wanted, where, caches):
                    failed.append(what)
                    break
    print_tables(
        console, zoo_tables(one for one in _read(where) if not models or one.cell.get("model") in models), where
    )
    if failed:
        raise BadInput(f"{len(failed)} of {len(cells)} could not be measured: {'; '.join(failed)}")


def _is_measured(model: str, batch: int, wanted: Sequence[str], where: Path, here: dict[str, Any]) -> bool:
    """Return whether a cell has records of all variants; ``batch`` 0 is that of a factory's example."""
    its = [one for one in _read(where) if one.cell.get("model") == model and batch in (0, one.cell.get("batch"))]
    settled = {one.variant for one in its if is_settled(one, here, ROUNDS)}
    return settled >= {*wanted}


def _read(where: Path) -> list[Record]:
    """Return the records of zoos in a file, none if there is no file."""
    return [one for one in (read_records(where) if where.exists() else []) if one.kind == KIND]


def _ran(measure: Callable[..., None], *arguments: Any) -> bool:
    """Run a function in a process of its own, until it ends; returns whether it came to its end."""
    process = multiprocessing.get_context("spawn").Process(target=measure, args=arguments)
    process.start()
    try:
        process.join()
    finally:
        process.kill()  # at an interrupt; one that has ended stays what it is
        process.join()
    return process.exitcode == 0


def _keep_caches_in(folder: str) -> None:
    """Let all that compiles, and the plans of runners, keep what they make there."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        os.environ[name] = f"{folder}/{name.lower()}"


def _measure(model: str, batch: int, wanted: Sequence[str], where: Path, caches: str) -> None:
    """Measure all variants of a cell, the runner first."""
    _keep_caches_in(caches)
    device = torch.device("cuda", torch.cuda.current_device())
    subject = zoo_subject(model, batch, device)
    known = {variant.name: variant for variant in catalogue(subject.cell)}
    variants = [known[name] for name in wanted]
    options = BenchOptions(where, environment(device), ROUNDS, kind=KIND)
    began = time.monotonic()

    def begins(what: str, _share: float) -> None:
        print(f"  {time.monotonic() - began:3.0f} s: {what}", flush=True)

    run_cell(subject, [PatternRun(subject.cell, NEVER, variants)], options, begins)


def _answer_again(model: str, batch: int, _wanted: Sequence[str], where: Path, caches: str) -> None:
    """Record how soon the next process answers, by the caches of the one before."""
    _keep_caches_in(caches)
    device = torch.device("cuda", torch.cuda.current_device())
    subject = zoo_subject(model, batch, device)
    known = {variant.name: variant for variant in catalogue(subject.cell)}
    error, measured, notes = None, None, []
    try:
        with subject.exits(NEVER):
            built = known[DEFAULT].build(VariantCaptures(subject), NEVER)
        measured, notes = {"first_answer_s": [built.first_answer_s]}, [f"{built.note}"]
        built.close()
    except Exception as failure:
        error = str(Failure.of(failure))
    record = Record(
        KIND, subject.cell.as_json(), AGAIN, secrets.token_hex(6), environment(device), {"rounds": ROUNDS},
        measured=measured, notes=notes, error=error,
    )  # fmt: skip
    append_record(where, record)
