"""``advise``: one GPU, replicas, ``parallelize`` or ``pipelined``, with the figures, by the facts of one GPU."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from ...model.basics.tables import wrapped
from ...model.parallel.balance import balanced
from ..records.tables import RecordTable, as_rich
from .devices import HOST_US, LINK_BYTES_PER_US, LINK_US, MOST, Facts, Splits


class Row(NamedTuple):
    """A way to answer batches of a size, one request at a time on each replica."""

    batch: int
    way: str
    gpus: int
    us: float
    samples_s: float
    known: str
    """"measured" or "predicted"."""


class Advice(NamedTuple):
    """The ways that there are, and in sentences which to take and why."""

    rows: list[Row]
    sentences: list[str]

    def show(self, console: Console, title: str) -> None:
        """Print it in 80 columns, the sentences below."""
        columns = ("batch", "way", "GPUs", "ms a batch", "samples/s", "")
        rows: list[tuple[str, ...]] = [
            (f"{each.batch:,}", each.way, str(each.gpus), f"{each.us / 1e3:,.2f}", f"{each.samples_s:,.0f}", each.known)
            for each in self.rows
        ]
        console.print(as_rich(RecordTable(title, columns, 2, rows, [])) if rows else title, width=80)
        console.print(wrapped(self.sentences) + "\n")


def advise(facts: Facts, gpus: int, batches: Sequence[int]) -> Advice:
    """Say how to run a network on so many GPUs like the one that was measured, for batch sizes in ascending order."""
    splits, largest = Splits(facts, gpus), batches[-1]
    rows, sooner = list[Row](), list[str]()
    for batch in batches:
        _, least = facts.best.get(batch, ("", 0.0))
        if least:
            rows.append(Row(batch, "one GPU", 1, least, 1e6 * batch / least, "measured"))
            rows.append(Row(batch, "replicas", gpus, least, 1e6 * batch / least * gpus, "predicted"))
        if (split := splits.parallelize(batch)) is not None:
            us = max(split.us, least)  # which has heads, too: the same work and links take no less
            rows.append(Row(batch, "parallelize", gpus, us, 1e6 * batch / us, "predicted"))
        if (split := splits.pipelined(batch)) is not None:
            way = f"pipelined, split_size {split.samples:,}"
            rows.append(Row(batch, way, gpus, split.us, 1e6 * batch / split.us, "predicted"))
            sooner += [f"{batch:,}"] if split.us < least else []
    if facts.best:
        names = ", ".join(dict.fromkeys(name for name, _ in facts.best.values()))
        said = [
            f"It fits on one GPU: {_takes(facts, largest)}. Take one GPU for the soonest answer ({names}), and for the "
            f"most samples a second replicas, a process for each of {gpus} GPUs, with the whole network in each."
        ]
        if sooner:  # replicas take N turns of a part for a share of the batch, n micro-batches n + N - 1
            said.append(
                f"A batch of {' or '.join(sooner)} is predicted to be answered sooner by a pipeline than by one GPU, "
                "but by replicas that take a share of it each still sooner."
            )
    else:
        takes = f"{_takes(facts, largest)}.{_smaller(facts, largest)}"
        said = [f"It does not fit on one GPU, which ran out of memory: {takes}"]
    if splits.pipelined(1) is None:
        said.append(_why_not(facts, gpus))
    else:
        said += [] if facts.best else _which_split(splits, gpus, largest)
        sizes = ", ".join(f"{size:,}" for size in sorted(facts.us))
        said.append(
            f'Splits are predicted (trunk="{facts.trunk}") by times of the segments between taps, without heads, on '
            f"this GPU in batches of {sizes}, linearly between and beyond; all GPUs are taken to be like it. Assumed: "
            f"links of {LINK_BYTES_PER_US / 1e3:g} GB/s and {LINK_US:g} us, {HOST_US / 1e3:g} ms of the hosts for each "
            "micro-batch. Samples a second are those of one request at a time."
        )
    return Advice(rows, said)


def _takes(facts: Facts, batch: int) -> str:
    """Say what the whole network takes of one GPU."""
    said = f"{_size(sum(facts.held))} of parameters and buffers"
    if facts.us:
        said += f", about {_size(max(facts.costs(batch).at_work))} at work in batches of {batch:,}"
    return said if facts.free is None else f"{said}; {_size(facts.free)} are free"


def _smaller(facts: Facts, batch: int) -> str:
    """Say up to which batch it might fit, below the one that does not."""
    if not facts.us or facts.free is None:
        return ""
    smaller, segments = [2**power for power in range((batch - 1).bit_length())], len(facts.held)
    fitting = [size for size in smaller if facts.costs(size).bytes_of(0, segments) <= facts.free]
    return f" Batches of up to {max(fitting):,} may fit: try --batch {max(fitting)}." if fitting else ""


def _which_split(splits: Splits, gpus: int, batch: int) -> list[str]:
    """Say of a network that can only be split which way to take for which batches."""
    start, said = splits.pays_from(), []
    whole = None if start == 1 else splits.parallelize(min(batch, start // 2) if start else batch)
    if whole is not None:
        when = f" for batches below {start:,}" if start else ""
        where = f'cut behind {", ".join(whole.ends)} (balance="auto")'
        said.append(f"Take parallelize{when}: one process for {gpus} GPUs, {where}.")
    if start is None:
        said.append(f"A pipeline is predicted to answer no batch of up to {MOST:,} sooner.")
    elif (piped := splits.pipelined(shown := max(batch, start))) is not None:
        where = f'cut behind {", ".join(piped.ends)} (stages="auto")'
        said.append(
            f"Take pipelined from batches of {start:,} on: a process for each of {gpus} GPUs, for {shown:,} samples "
            f"with split_size={piped.samples}, {where}."
        )
    return said


def _why_not(facts: Facts, gpus: int) -> str:
    """Say why a network cannot be split over so many GPUs."""
    if gpus > len(facts.held):
        whys = "".join(f"; not at {tap}: {why}" for tap, why in facts.uncuttable.items())
        ends = ", ".join(facts.ends) or "no tap"
        return f"It cannot be split into {gpus} parts, {len(facts.held)} at most: parts can end at {ends}{whys}."
    if not facts.us:
        held = _size(max(facts.held))
        return f"No split is predicted: a segment alone, of {held} at most, ran out of memory in a batch of 1."
    costs = facts.costs(1)
    starts = balanced(costs, [facts.free] * gpus)
    if starts is None:
        most = max(costs.bytes_of(segment, segment + 1) for segment in range(len(facts.held)))
        return (
            f"It does not fit on {gpus} GPUs either: of its {len(facts.held)} segments the largest takes {_size(most)} "
            "for one sample. Take more GPUs, or heads at more taps."
        )
    cuts = ", ".join(facts.ends[start - 1] for start in starts[1:])
    return (
        f"It cannot be split into {gpus} parts: cut behind {cuts}, as it balances, two would read "
        f"{facts.torn(starts)!r}, wants heads at other taps."
    )


def _size(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
