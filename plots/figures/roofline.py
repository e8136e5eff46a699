"""Figure "roofline": heads alone against the memory's bandwidth, as time by bytes and rate by intensity."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...autotune.records.heads import last_runs
from ...autotune.records.record import Record
from ..records import NoRecords, stamp
from ..style import BLUE, GREY, ORANGE, PURPLE, Line, frame, heading, legend_beside, new_figure, tidy

LINES = {
    "eager": Line("plain PyTorch", ORANGE, "", "s"),
    "compiled": Line("torch.compile, max-autotune", PURPLE, "", "^"),
    "fused": Line("auxhead: fused head", BLUE, "", "o"),
}
#: A head is bound by latency if it takes more than this many times as long as its bytes.
TIMES = 10.0
#: Heads with as many classes or more are drawn hollow.
MANY_CLASSES = 100


def roofline_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return bytes, operations and times of each head, of its last run in which the fused one was timed."""
    timed = [run for run in last_runs(records) if "bytes" in run and "fused" in run and run["fused"].device_us]
    if not timed:
        raise NoRecords("no fused head that was timed, with the bytes that it has to move")
    heads = sorted((_head(run) for run in timed), key=lambda head: (head["bytes"], head["flop"]))
    bandwidth = median(head["copy_bytes_per_second"] for head in heads)
    return {
        "title": _title(heads),
        "heads": heads,
        "copy_gb_per_second": bandwidth / 1e9,
        "least_fused_us": min(head["us"]["fused"] for head in heads),
        "stamp": _stamp([record for run in timed for record in run.values()], bandwidth),
    }


def flop(cell: Mapping[str, Any]) -> int:
    """Return the operations of a head: the adds (or maxima) of its pool, and two for each weight and sample."""
    windows = cell["grid_h"] * cell["grid_w"]
    inputs = cell["samples"] * cell["channels"] * cell["height"] * cell["width"]
    pooled = cell["samples"] * cell["channels"] * windows
    return int(inputs + 2 * pooled * cell["classes"])


def _head(run: Mapping[str, Record]) -> dict[str, Any]:
    cell, least = run["fused"].cell, run["bytes"].protocol
    times = {name: run[name].device_us for name in LINES if name in run}
    us = {name: taken["median"] for name, taken in times.items() if taken is not None}
    operations = flop(cell)
    return {
        "head": f"{cell['model']} {cell['tap']}, batch {cell['samples']}, {cell['classes']} classes",
        "classes": cell["classes"],
        "bytes": least["bytes"],
        "flop": operations,
        "flop_per_byte": operations / least["bytes"],
        "us": us,
        "gflop_per_second": {name: operations / taken / 1e3 for name, taken in us.items()},
        "copy_bytes_per_second": least["bytes_per_second"],
        "bytes_us": least["bytes"] / least["bytes_per_second"] * 1e6,
    }


def _title(heads: Sequence[Mapping[str, Any]]) -> str:
    waiting = [head["us"]["fused"] for head in heads if head["us"]["fused"] > TIMES * head["bytes_us"]]
    best = 100 * max(head["bytes_us"] / head["us"]["fused"] for head in heads)
    # more than all of it where a head's input lies in the L2 cache
    reach = f"the best reaches {best:.0f} % of a copy's bandwidth" if best < 100 else "the best is as fast as a copy"
    if not waiting:
        return f"None of {len(heads)} fused heads takes {TIMES:.0f} times what its bytes take;\n{reach}"
    low, high = min(waiting), max(waiting)
    return (
        f"{len(waiting)} of {len(heads)} fused heads are bound by latency: {low:.1f} to {high:.1f} us, "
        f"over {TIMES:.0f} times\nwhat their bytes take; {reach}"
    )


def _stamp(records: Sequence[Record], bandwidth: float) -> str:
    models = sorted({f"{record.cell['model']} {record.cell['dtype']}" for record in records})
    batches = sorted({record.cell["samples"] for record in records})
    return stamp(
        records,
        f"heads of {', '.join(models)}, batch {', '.join(map(str, batches))}; alone, launches back to back in a CUDA "
        "graph, inputs warm in the L2 cache where they fit",
        f"bandwidth: of a copy in device memory, measured: {bandwidth / 1e12:.2f} TB/s, read and written; hollow: "
        f"{MANY_CLASSES} classes or more",
        "bytes: input, weights and answer, once each; operations: one an input of the pool, two a weight and sample",
    )


def roofline_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw time over bytes, and rate over arithmetic intensity."""
    figure = new_figure(5.0)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.0, 0.13))
    legend, left, right = (figure.add_subplot(place) for place in (grid[1, :], grid[0, 0], grid[0, 1]))
    for axes in (left, right):
        tidy(axes, "both", xscale="log", yscale="log")
    heads, per_us = numbers["heads"], numbers["copy_gb_per_second"] * 1e3  # bytes a microsecond
    _points(left, heads, lambda head: head["bytes"] / 1e6, lambda head, name: head["us"][name])
    megabytes = np.geomspace(*_range([head["bytes"] / 1e6 for head in heads]))
    left.plot(megabytes, megabytes * 1e6 / per_us, color="black", linewidth=1.2, label="bytes / copy bandwidth")
    left.plot(
        megabytes, numbers["least_fused_us"] + megabytes * 1e6 / per_us, color=GREY, linewidth=1.2, linestyle="--",
        label=f"the same + {numbers['least_fused_us']:.1f} us (least fused time)",
    )  # fmt: skip
    left.set(xlabel="bytes that the head has to move, MB (log)", ylabel="device time of one head, us (log)")
    heading(left, "time by bytes")
    left.set_ylim(bottom=numbers["least_fused_us"] / TIMES)
    _points(right, heads, lambda head: head["flop_per_byte"], lambda head, name: head["gflop_per_second"][name])
    intensity = np.geomspace(*_range([head["flop_per_byte"] for head in heads]))
    right.plot(intensity, intensity * numbers["copy_gb_per_second"], color="black", linewidth=1.2)
    right.set(xlabel="arithmetic intensity, FLOP/byte (log)", ylabel="achieved rate, GFLOP/s (log)")
    heading(right, "roofline")
    legend_beside(legend, left, 3)
    return frame(figure, numbers)


def _points(
    axes: Axes,
    heads: Sequence[Mapping[str, Any]],
    x: Callable[[Mapping[str, Any]], float],
    y: Callable[[Mapping[str, Any], str], float],
) -> None:
    """Draw each variant of each head; hollow where there are many classes."""
    for name, line in LINES.items():
        looks = {**line.looks, "markersize": 5.5}
        for many in (False, True):
            own = [head for head in heads if name in head["us"] and (head["classes"] >= MANY_CLASSES) == many]
            face = "none" if many else line.colour
            xs, ys = [x(head) for head in own], [y(head, name) for head in own]
            axes.plot(xs, ys, **{**looks, "label": None, "markerfacecolor": face})
        axes.plot([], [], **looks)


def _range(values: Sequence[float]) -> tuple[float, float, int]:
    return min(values) / 1.5, max(values) * 1.5, 100
