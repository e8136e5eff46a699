"""Runs ``auxhead-tune plan --devices N``: measures segments on this GPU, and prints predictions for several."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from rich.console import Console

from ...model.auto.example_batches import batches_of, exits_of, shares_of
from ..measuring.cells import Cell
from ..records.tables import RecordTable, print_tables, wide_console
from .layouts import HostTimes, Layout, best_layouts
from .run import one_line_of, subject_to_plan
from .segment_times import copy_ms, measure_segments

#: Micro-batches that a request is split into.
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
#: GB/s, one way, where there is nothing to measure and nothing is said.
USUAL_LINK = 300.0
#: Of pipelines over two H200s, the medians of h200/pipelines.jsonl; there is nothing to measure them with on one GPU.
USUAL_HOSTS = HostTimes(hand_on_ms=0.78, request_ms=1.56)
_ROWS = 12


def run_devices(
    model: str, cell: Cell | None, batches: Sequence[int], exits: Sequence[str], gpus: int, link: float | None
) -> None:
    """Measure, predict and print.

    Args:
        model: the user's factory, unless there is a cell.
        cell: that of a ResNet.
        batches: images of a request; none: those of the example.
        exits: names or globs of exit patterns; none: that of the user's model, or all.
        gpus: how many to plan for.
        link: GB/s from one GPU to another; None: measured where there are two.

    Raises:
        BadInput: no CUDA device, no such factory or exit pattern, or a network that cannot be cut or captured.
    """
    console = wide_console()
    subject, samples, patterns = subject_to_plan(model, cell, exits)
    link_ms, link_in_words = _link(link)
    taps = subject.network.taps
    for batch in sorted(set(batches or [subject.cell.batch])):
        of_batch = dataclasses.replace(subject.cell, batch=batch)
        times = []
        for size in sorted({-(-batch // parts) for parts in _MICRO_BATCHES}):
            with console.status(f"{of_batch}; split size {size}"), one_line_of(of_batch):
                times.append(measure_segments(subject.network, samples, size, link_ms))
        for pattern in patterns:
            with subject.exits(pattern), one_line_of(of_batch):
                exit_index = exits_of(subject.network, batches_of(samples, subject.cell.batch))
            shares = shares_of(exit_index, len(taps))
            [alone] = best_layouts(times, shares, batch, 1)
            layouts = best_layouts(times, shares, batch, gpus, USUAL_HOSTS)
            title = f"{of_batch}; exits {pattern}; {gpus} GPUs, predicted"
            _print(console, _table(title, layouts, alone, taps), shares, taps, link_in_words)
            for line in advice(layouts, alone, taps):
                console.print(line, soft_wrap=True)
            console.print()


def _link(gb_s: float | None) -> tuple[Callable[[int], float], str]:
    """Return the function from bytes to ms on the way to another GPU, and where it is from."""
    if gb_s is None and torch.cuda.device_count() > 1:
        one, other = (torch.device("cuda", index) for index in range(2))
        return lambda size: copy_ms(size, one, other), "measured between cuda:0 and cuda:1"
    speed = USUAL_LINK if gb_s is None else gb_s
    source = "a guess: there is one GPU here and no --link" if gb_s is None else "as --link says"
    return lambda size: size / (speed * 1e6), f"{speed:g} GB/s, {source}"


def _print(
    console: Console, table: RecordTable, shares: Sequence[float], taps: Sequence[str], link_in_words: str
) -> None:
    print_tables(console, [table])
    leave = ", ".join(f"{share:.0%} {where}" for share, where in zip(shares, (*taps, "classifier"), strict=True))
    console.print(f"Samples leave at: {leave}. Links: {link_in_words}.", soft_wrap=True)
    console.print(
        f"Hosts of several stages: {USUAL_HOSTS.hand_on_ms:g} ms to hand a micro-batch on and "
        f"{USUAL_HOSTS.request_ms:g} ms a request, as measured on two H200s; a guess for others.",
        soft_wrap=True,
    )
    console.print("One GPU is one stage: it takes every sample through the whole network.", soft_wrap=True)


def _table(title: str, layouts: Sequence[Layout], alone: Layout, taps: Sequence[str]) -> RecordTable:
    columns = (
        "GPUs a stage", "cuts behind", "replicas", "split size", "ms a request", "images/s", "/ one GPU", "/ bound",
        "GPUs busy", "runs today",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            " + ".join(str(stage.gpus) for stage in one.stages),
            ", ".join(_cuts(one, taps)) or "none",
            str(one.replicas),
            str(one.split_size),
            f"{one.prediction.request_ms:.2f}",
            f"{one.prediction.images_per_s:,.0f}",
            f"{one.prediction.images_per_s / alone.prediction.images_per_s:.2f}",
            f"{one.prediction.images_per_s / one.bound:.2f}",
            f"{one.busy:.0%}",
            "yes" if one.runs_today else "no",
        )
        for one in layouts[:_ROWS]
    ]
    return RecordTable(title, columns, 2, rows, [])


def advice(layouts: Sequence[Layout], alone: Layout, taps: Sequence[str]) -> list[str]:
    """Say what to do: the best layout, and the best that runs today with the call and the command for it.

    Args:
        layouts: the best first.
        alone: the one for a GPU.
        taps: of the network.
    """
    best, today = layouts[0], next(one for one in layouts if one.runs_today)
    lines = []
    if best is not today:
        lines.append(
            f"Best: {_in_words(best, alone)}, but several GPUs for a stage are not run yet: `pipelined` has one each."
        )
    lines.append(f"{'Best' if best is today else 'Best that runs today'}: {_in_words(today, alone)}.")
    stages, replicas = len(today.stages), today.replicas
    if stages == 1:
        command = f"torchrun --standalone --nproc-per-node {replicas} -m auxhead.model infer"
        lines.append(f"Run it by any runner in a process for each GPU, as `{command}` does.")
        return lines
    call = f'pipelined(network, x, split_size={today.split_size}, stages={_cuts(today, taps)}, trunk="cudnn")'
    command = f"torchrun --standalone --nproc-per-node {stages} script.py"
    how = f"Run it by {call} in a script, started by `{command}`"
    if replicas > 1:
        how += f", {replicas} times, each with GPUs of its own in CUDA_VISIBLE_DEVICES; deal the requests to them"
    return [*lines, f"{how}."]


def _cuts(layout: Layout, taps: Sequence[str]) -> list[str]:
    return [taps[start - 1] for start in layout.starts[1:]]


def _in_words(layout: Layout, alone: Layout) -> str:
    count = len(layout.stages)
    what = "the whole network" if count == 1 else f"{count} stages"
    gpus = " + ".join(str(stage.gpus) for stage in layout.stages)
    if layout.replicas > 1:
        what = f"{layout.replicas} replicas of {what}, each"
    speed = layout.prediction.images_per_s
    return (
        f"{what} on {gpus} GPU{'s' * (gpus != '1')}, {speed:,.0f} images/s, "
        f"{speed / alone.prediction.images_per_s:.2f} times one GPU's"
    )
