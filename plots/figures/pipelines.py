"""Figure "pipeline": images a second over two GPUs by the size of micro-batches, beside one GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...autotune.records.record import Record, latest
from ..records import NoRecords, rounds, stamp
from ..style import (
    AMBER,
    BLUE,
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
)

#: Lines by variant.
LINES = {
    "tutorial": Line("PyTorch's tutorial, pipelined", ORANGE, "-", "s"),
    "pipelined-one-head": Line("ours, one head", SKY, "-", "v"),
    "pipelined-heads": Line("ours, a head after each stage", BLUE, "-", "D"),
}
#: Variants without micro-batches.
LEVELS = {
    "one-gpu": Line("one GPU, CUDA graph", GREY, ":", ""),
    "one-gpu-cudnn": Line("the same with our pipelines' trunk", GREY, "--", ""),
    "model-parallel": Line("model-parallel, no pipeline", AMBER, "-.", ""),
}
OURS, NAIVE, ALONE = "pipelined-heads", "model-parallel", "one-gpu-cudnn"
BANDS = "Bands: 20th to 80th percentile."


def pipeline_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return images a second by batch, variant and split size."""
    found = [one for one in latest(one for one in records if one.kind == "pipeline") if one.measured]
    batches: dict[str, dict[str, Any]] = {}
    for batch in sorted({int(one.cell["batch"]) for one in found}):
        of_batch = [one for one in found if one.cell["batch"] == batch]
        points = {variant: _points(of_batch, variant) for variant in LINES}
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
    cell, protocol = records[0].cell, records[0].protocol
    return f"{cell['model']}, {cell['dtype']}, cut behind {protocol['cut']}; {protocol['devices']} GPUs"


def _images(record: Record) -> dict[str, float]:
    assert record.measured is not None
    return {name: record.measured["images_s"][name] for name in ("median", "p20", "p80")}


def _points(records: Sequence[Record], variant: str) -> list[dict[str, Any]]:
    points = []
    for one in records:
        if one.variant.partition("@")[0] == variant and one.measured is not None:
            points.append({"split_size": one.measured["split_size"], **_images(one)})
    return sorted(points, key=lambda point: int(point["split_size"]))


def _pipeline_title(batches: Mapping[str, Any]) -> str:
    """Compare the best split size at the largest batch with one GPU and with two that take turns."""
    batch = max(batches, key=int)
    lines, levels = batches[batch]["lines"], batches[batch]["levels"]
    missing = [name for name in (NAIVE, ALONE) if name not in levels]
    if OURS not in lines or missing:
        raise NoRecords(f"no record of {OURS} beside {' and '.join(missing) or NAIVE} at batch {batch}")
    ours = max(point["median"] for point in lines[OURS])
    alone, naive = (ours / levels[name]["median"] for name in (ALONE, NAIVE))
    return (
        f"Two GPUs as a pipeline: {alone:.2f} times the images of one that has room for all,\n"
        f"{naive:.2f} times those of two that take turns (batch {batch})"
    )


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
    for variant, line in LINES.items():
        if points := found["lines"].get(variant, []):
            line_with_band(axes, line, [point["split_size"] for point in points], points, ("p20", "p80"))
    for variant, line in LEVELS.items():
        if variant in found["levels"]:
            level = found["levels"][variant]["median"]
            axes.axhline(level, label=line.label, color=line.colour, linestyle=line.dashes, linewidth=1.4)
    axes.set_ylim(bottom=0)
    tidy(axes, "both", f"batch {batch}", xlabel="images of a micro-batch")
