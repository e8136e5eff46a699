"""Figures of two GPUs: "pipeline", images a second by the size of micro-batches, and "gpus", when each computes."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...autotune.records.intervals import length
from ...autotune.records.record import Record, latest
from ..records import NoRecords, rounds, stamp
from ..style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    Line,
    bars,
    frame,
    legend_beside,
    line_with_band,
    new_figure,
    note,
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
#: Names of the ways to run; a split size follows them.
NAMES = {
    "model-parallel": "model-parallel, no pipeline",
    "tutorial": "PyTorch's tutorial, pipelined",
    "pipelined-heads": "ours, a head after each stage",
    "pipelined-exits": "ours, {percent} % leave on GPU 0",
}
HOW = "Each shown: the second of two requests, under torch.profiler in every process, which makes them longer."


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


def gpus_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return when each GPU works in one request, by the way to run: intervals in milliseconds, shares in percent.

    Of several networks and batches the one measured last is taken.
    """
    of_kind = [one for one in records if (one.kind, one.error) == ("gpus", None)]
    found = [one for one in latest(of_kind) if one.run == of_kind[-1].run and one.variant.partition("@")[0] in NAMES]
    nobody_leaves = [_name(one) for one in found if one.exits == "never"]
    if len(nobody_leaves) < 2:
        raise NoRecords(f"no timelines of two of {', '.join(NAMES)} where nobody leaves")
    panels = {_name(one): _panel(one) for one in found}
    cell = found[0].cell
    return {
        "title": _gpus_title(panels, nobody_leaves),
        "stamp": stamp(found, f"{cell['model']}, {cell['dtype']}, batch {cell['batch']}. {HOW}"),
        "panels": panels,
    }


def _name(record: Record) -> str:
    variant, _, split_size = record.variant.partition("@")
    name = NAMES[variant].format(percent=record.exits.partition("/")[0])
    return f"{name}, micro-batches of {split_size}" if split_size else name


def _panel(record: Record) -> dict[str, Any]:
    assert record.measured is not None
    measured = record.measured
    computes, exchanges = (
        [[[begin / 1e3, end / 1e3] for begin, end in of_gpu] for of_gpu in measured[name]]
        for name in ("computes", "exchanges")
    )
    span = measured["span_us"] / 1e3
    busy = [round(100.0 * length((begin, end) for begin, end in of_gpu) / span, 1) for of_gpu in computes]
    return {"span_ms": span, "computes": computes, "exchanges": exchanges, "busy_percent": busy}


def _gpus_title(panels: Mapping[str, Any], nobody_leaves: Sequence[str]) -> str:
    """Compare the first and the last way to run of those that compute the same."""
    ways = []
    for name in (nobody_leaves[0], nobody_leaves[-1]):
        busy = " and ".join(f"{share:.0f}" for share in panels[name]["busy_percent"])
        ways.append(f"{panels[name]['span_ms']:.1f} ms {name.partition(',')[0]}, GPUs compute {busy} % of it")
    return f"One request: {ways[0]};\n{ways[1]}"


def gpus_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw a panel a way to run, a lane a GPU in each."""
    panels = numbers["panels"]
    figure = new_figure(1.4 + 1.3 * len(panels))
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, panel) in zip(all_axes, panels.items(), strict=True):
        _lanes(axes, name, panel)
    all_axes[-1].set_xlabel("ms since the request's first kernel")
    handles = [Patch(color=BLUE, label="kernels and copies"), Patch(color=PURPLE, alpha=0.5, label="NCCL, or waiting")]
    all_axes[0].legend(
        handles=handles, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8
    )
    return frame(figure, numbers)


def _lanes(axes: Axes, name: str, panel: Mapping[str, Any]) -> None:
    gpus = len(panel["computes"])
    for gpu in range(gpus):
        height = gpus - 1 - gpu
        axes.broken_barh(bars(panel["exchanges"][gpu]), (height, 0.25), color=PURPLE, alpha=0.5, linewidth=0)
        axes.broken_barh(bars(panel["computes"][gpu]), (height + 0.25, 0.5), color=BLUE, linewidth=0)
    labels = [f"GPU {gpu}, {panel['busy_percent'][gpu]:.0f} %" for gpu in range(gpus)]
    axes.set_yticks([gpus - 1 - gpu + 0.4 for gpu in range(gpus)], labels)
    axes.set_ylim(-0.1, gpus)
    note(axes, name, (0.0, 1.0), (0, 2), xycoords="axes fraction", va="bottom", fontsize=8.5, color=GREY)
    tidy(axes, "x")
    axes.tick_params(axis="y", length=0)
