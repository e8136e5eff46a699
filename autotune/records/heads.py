"""Heads alone as their records have them: of each the run that counts, and of many how they compare with peers."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .record import Record

#: The kind of records of random heads.
RANDOM = "random-heads"
#: Kinds of random heads: one linear layer behind a pool of the whole map to its average, of windows to theirs, to
#: maxima, or none; behind all tokens pooled, or the first; behind pooled vectors; and with more layers behind any of
#: these, a hidden one or a norm alone.
KINDS = ("pooled", "windows", "max", "flattened", "tokens", "first token", "vector", "hidden", "norm")

#: Records of one head that was measured in the same rounds, by variant.
Measured = Mapping[str, Record]


def last_runs(records: Iterable[Record], kind: str = "heads") -> list[Measured]:
    """Return of each head in each environment the last run in which it was timed, else the last one."""
    runs: dict[tuple[Any, ...], dict[str, dict[str, Record]]] = {}
    for record in records:
        if record.kind == kind:
            thing = (json.dumps(record.cell, sort_keys=True), record.environment_key)
            runs.setdefault(thing, {}).setdefault(record.run, {})[record.variant] = record
    chosen: list[Measured] = []
    for of_head in runs.values():
        timed = [run for run in of_head.values() if "fused" in run and run["fused"].error is None]
        chosen.append((timed or list(of_head.values()))[-1])
    return chosen


class Ratio(NamedTuple):
    """The time of a head's peer over that of the fused head, with its interval: above 1 the fused head is faster."""

    ratio: float
    low: float
    high: float


def ratio_to(measured: Measured, peer: str) -> Ratio | None:
    """Return a peer's time over the fused head's; None unless both were timed."""
    if peer not in measured or not measured[peer].paired:
        return None
    (pair,) = measured[peer].paired
    return Ratio(pair["device_ratio"], pair["low"], pair["high"])


class Summary(NamedTuple):
    """Ratios of several heads."""

    heads: int
    as_fast: int
    """Heads that are at least as fast as their peer."""
    surely_slower: int
    """Heads that are slower by more than the noise."""
    median: float
    worst: float

    def __str__(self) -> str:
        share = 100 * self.as_fast / self.heads
        return f"in {share:.1f} % of {self.heads:,} (worst {self.worst:.2f}, median {self.median:.2f})"


def summary_of(ratios: Sequence[Ratio]) -> Summary:
    """Summarise one ratio or more."""
    values = [one.ratio for one in ratios]
    as_fast, slower = sum(value >= 1.0 for value in values), sum(one.high < 1.0 for one in ratios)
    return Summary(len(values), as_fast, slower, statistics.median(values), min(values))


def finding(heads: Sequence[Measured]) -> str:
    """Say in one sentence how heads compare with plain PyTorch, and those that were with torch.compile."""
    peers = {"plain PyTorch": "eager", "torch.compile": "compiled"}
    found = {name: [one for head in heads if (one := ratio_to(head, peer))] for name, peer in peers.items()}
    said = [f"as {name} {summary_of(ratios)}" for name, ratios in found.items() if ratios]
    return f"Fused heads are at least as fast {'; '.join(said)}" if said else "No head was timed"


def head_in_words(cell: Mapping[str, Any]) -> str:
    """Describe a random head by its cell: its input, layers, classes and dtype."""
    sizes, windows = "x".join(map(str, cell["input"])), cell["pool_size"]
    pool = {"none": "not pooled", "first": "first token"}.get(cell["pool"], cell["pool"])
    parts = [f"{pool} {windows}x{windows}" if windows > 1 else pool] if len(cell["input"]) > 2 else []
    parts += ["LayerNorm"] * cell["norm"]
    parts += [f"{cell['hidden']} {cell['activation']}"] * (cell["hidden"] > 0)
    layout = " channels last" if cell["memory_format"] == "channels_last" else ""
    return f"{sizes} {cell['dtype']}{layout}; {', '.join(parts)}{', ' if parts else ''}{cell['classes']:,} classes"
