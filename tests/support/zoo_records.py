"""Records of the zoo as ``auxhead-tune zoo`` writes them, with made-up times."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from auxhead.autotune.records.record import Record
from auxhead.autotune.records.zoo import AGAIN, COMPILED, DEFAULT, GRAPH

from .pretended_gpu import ENVIRONMENT

#: The other variants that are always measured.
OTHERS = (GRAPH, "eager-bare@as_is", "eager-naive-item@as_is", "eager@as_is", "eager-stop@as_is")


def zoo_record(
    model: str, batch: int, variant: str, device: float | None = None, run: str = "r", **fields: Any
) -> Record:
    """A variant of a network; its times spread by a tenth, and without any it has no times."""
    cell = {
        "model": model, "dtype": "float16", "batch": batch, "classes": 1000, "placement": "own",
        "taps": ["a", "b", "c"], "input": [3, 224, 224],
    }  # fmt: skip
    protocol = {"rounds": 20, "captures": 2}
    if device is not None:
        times = {"median": device, "p20": 0.9 * device, "p80": 1.1 * device, "captures": [device]}
        fields |= {"device_us": times, "host_us": {**times, "median": device + 40.0}}
    return Record("zoo", cell, variant, run, ENVIRONMENT, protocol, **fields)


def zoo_records(model: str, batch: int, ours: float, compiled: float, run: str = "r") -> list[Record]:
    """All records of a network at one batch size, of two processes."""
    notes = ["capture 1: Batch 1: overlapped (1 fork) on cudnn, measured 203.6 us to the answer: 48.1% less than it."]
    first = {"first_answer_s": [28.4, 0.1], "joules": 0.02}
    return [
        zoo_record(model, batch, DEFAULT, ours, run, notes=notes, measured=first),
        zoo_record(model, batch, COMPILED, compiled, run, measured={"first_answer_s": [9.5], "joules": 0.025}),
        *(zoo_record(model, batch, name, 200.0, run) for name in OTHERS),
        zoo_record(model, batch, AGAIN, run=f"{run} again", measured={"first_answer_s": [1.25]}),
    ]


def failed(records: list[Record], variant: str, error: str) -> list[Record]:
    """The same records, where a variant failed."""
    bad = {"device_us": None, "host_us": None, "measured": None, "error": error}
    return [replace(one, **bad) if one.variant == variant else one for one in records]


def noting(path: Path, error: str | None) -> None:
    """Stand in for what measures in a process of its own: note that process."""
    path.write_text(f"{os.getpid()}")
    if error is not None:
        raise RuntimeError(error)


def forking(path: Path) -> None:
    """Measure nothing: end while a process goes on that this one has forked, whose id lies in a file."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    path.write_text(str(pid))
    os._exit(1)
