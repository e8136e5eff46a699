"""Figures of two GPUs: "pipeline", images a second by the size of micro-batches, and "gpus", when each computes."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...autotune.records.record import Record, latest
from ..records import NoRecords, rounds, stamp
from ..style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    Line,
    frame,
    legend_beside,
    line_with_band,
    new_figure,
    row_of_panels,
    tidy,
)  # fmt: skip

#: Lines of "pipeline" by variant and exits.
LINES = {
    ("tutorial", "never"): Line("PyTorch's tutorial, pipelined", ORANGE, "-", "s"),
    ("pipelined-one-head", "never"): Line("ours, one head", SKY, "-", "v"),
    ("pipelined-heads", "never"): Line("ours, a head after each stage", BLUE, "-", "D"),
    ("pipelined-exits", "25/75"): Line("ours, 25 % leave on the first GPU", GREEN, ":", "o"),
    ("pipelined-exits", "50/50"): Line("ours, 50 % leave", GREEN, "--", "o"),
    ("pipelined-exits", "75/25"): Line("ours, 75 % leave", GREEN, "-", "o"),
}
#: Variants without micro-batches.
LEVELS = {
    "one-gpu": Line("one GPU, CUDA graph", GREY, ":", ""),
    "one-gpu-cudnn": Line("the same with our pipelines' trunk", GREY, "--", ""),
    "model-parallel": Line("model-parallel, no pipeline", AMBER, "-.", ""),
}
OURS, NAIVE = "pipelined-heads", "model-parallel"
BANDS = "Bands: 20th to 80th percentile. Hollow: what the graphs of the stages and the link allow."


def pipeline_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return images a second by batch, variant and split size, and what the stages and the link allow."""
    found = [one for one in latest(one for one in records if one.kind == "pipeline") if one.measured is not None]
    batches: dict[str, dict[str, Any]] = {}
    for batch in sorted({int(one.cell["batch"]) for one in found}):
        of_batch = [one for one in found if one.cell["batch"] == batch]
        points = {f"{variant}, {exits}": _points(of_batch, variant, exits) for variant, exits in LINES}
        levels = {one.variant: _images(one) for one in of_batch if one.variant in LEVELS}
        batches[str(batch)] = {"lines": {name: line for name, line in points.items() if line}, "levels": levels}
    network = _network(found)
    return {
        "title": _pipeline_title(batches),
        "stamp": stamp(found, f"{network}. Lines: median of {rounds(found)}.", BANDS),
        "network": network,
        "batches": batches,
    }


def _network(records: Sequence[Record]) -> str:
    cell, cuts = records[0].cell, {one.exits == "never": one.protocol["cut"] for one in records}
    where = f"cut behind {cuts[True]}" + (f", and {cuts[False]} where images leave there" if False in cuts else "")
    return f"{cell['model']}, {cell['dtype']}, {where}; {records[0].protocol['devices']} GPUs"


def _images(record: Record) -> dict[str, float]:
    assert record.measured is not None
    return {name: record.measured["images_s"][name] for name in ("median", "p20", "p80")}


def _points(records: Sequence[Record], variant: str, exits: str) -> list[dict[str, Any]]:
    points = []
    for one in records:
        if one.variant.partition("@")[0] == variant and one.exits == exits and one.measured is not None:
            measured = one.measured
            points.append(
                {"split_size": measured["split_size"], **_images(one), "bound": measured.get("bound_images_s")}
            )
    return sorted(points, key=lambda point: int(point["split_size"]))


def _pipeline_title(batches: Mapping[str, Any]) -> str:
    """Compare the best split sizes at the largest batch."""
    batch = max(batches, key=int)
    lines, levels = batches[batch]["lines"], batches[batch]["levels"]
    best = {name: max(point["median"] for point in points) for name, points in lines.items()}
    ours, leaving = best.get(f"{OURS}, never"), best.get("pipelined-exits, 50/50")
    if ours is None or NAIVE not in levels:
        raise NoRecords(f"no record of {OURS} beside {NAIVE} at batch {batch}")
    title = f"Batch {batch}: pipelined {ours / levels[NAIVE]['median']:.2f} times the throughput of model-parallel"
    if leaving is not None:
        title += f",\n{leaving / levels[NAIVE]['median']:.2f} times where half of the images leave on the first GPU"
    return title


def pipeline_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw a panel a batch, images a second over the size of micro-batches in each."""
    figure = new_figure(5.6)
    batches = numbers["batches"]
    legend, panels = row_of_panels(figure, (1, 0.35), len(batches))
    for axes, (batch, found) in zip(panels, batches.items(), strict=True):
        _images_panel(axes, batch, found)
    panels[0].set_ylabel("images a second")
    legend_beside(legend, panels[-1], 2, handlelength=4.0)
    return frame(figure, numbers)


def _images_panel(axes: Axes, batch: str, found: Mapping[str, Any]) -> None:
    for (variant, exits), line in LINES.items():
        points = found["lines"].get(f"{variant}, {exits}", [])
        if not points:
            continue
        sizes = [point["split_size"] for point in points]
        line_with_band(axes, line, sizes, points, ("p20", "p80"))
        if variant != "tutorial" and all(point["bound"] for point in points):
            bounds = [point["bound"] for point in points]
            axes.plot(sizes, bounds, color=line.colour, linestyle="", marker=line.marker, markerfacecolor="none")
    for variant, line in LEVELS.items():
        if variant in found["levels"]:
            level = found["levels"][variant]["median"]
            axes.axhline(level, label=line.label, color=line.colour, linestyle=line.dashes, linewidth=1.4)
    axes.set_ylim(bottom=0)
    tidy(axes, "both", f"batch {batch}", xlabel="images of a micro-batch")
