"""The records that come with the project, as the tests of its pages look them up."""

import gc
import json
from functools import cache
from types import ModuleType

import pytest
from auxhead.autotune.records.record import Record, read_records
from auxhead.plots.records import COMMITTED

from .documents import ROOT

#: Batch sizes of the tables.
BATCHES = (1, 8, 32, 128)


def report(name: str) -> dict:
    """A report of ``auxhead demo``."""
    return json.loads((COMMITTED / name).read_text())


@cache
def records(name: str) -> list[Record]:
    found = read_records(COMMITTED / name)
    gc.freeze()  # tens of thousands, which stay: to look them over at each collection takes seconds
    return found


def read_once(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let modules have the records that tests have read, which takes seconds, until the test of ``patch`` ends."""
    for module in modules:
        patch.setattr(module, "read_records", lambda path: records(str(path.relative_to(COMMITTED))))


def benched(
    variant: str,
    batch: int,
    classes: int = 10,
    placement: str = "blocks",
    exits: str = "never",
    name: str = "h200/bench.jsonl",
) -> Record:
    """The benchmark's last record of ResNet-18 in float16, in a file of records."""
    return [
        record
        for record in records(name)
        if (record.variant, record.exits) == (variant, exits)
        and (record.cell["model"], record.cell["dtype"]) == ("resnet18", "float16")
        and (record.cell["batch"], record.cell["classes"], record.cell["placement"]) == (batch, classes, placement)
    ][-1]


def figure(name: str) -> dict:
    """What is drawn in the gallery, which test_figures.py compares with the records."""
    return json.loads((ROOT / "plots" / "gallery" / f"{name}.json").read_text())
