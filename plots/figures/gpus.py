"""Figure "gpus": one request over two GPUs, when each computes and when it waits, by way to run."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...autotune.records.intervals import length
from ...autotune.records.record import Record, latest
from ..records import NoRecords, stamp
from ..style import BLUE, GREY, PURPLE, frame, new_figure, note, tidy

#: Names of the ways to run; a split size follows them.
NAMES = {
    "model-parallel": "model-parallel, no pipeline",
    "tutorial": "PyTorch's tutorial, pipelined",
    "pipelined-heads": "ours, a head after each stage",
    "pipelined-exits": "ours, {percent} % leave on GPU 0",
}
HOW = "Each shown: the second of two requests, under torch.profiler in every process, which makes them longer."


def draw(records: Sequence[Record]) -> tuple[Figure, dict[str, Any]]:
    """Draw the figure, and return it with the numbers in it: intervals in milliseconds, shares in percent.

    Of several networks and batches the one measured last is drawn.
    """
    of_kind = [one for one in records if (one.kind, one.error) == ("gpus", None)]
    found = [one for one in latest(of_kind) if one.run == of_kind[-1].run and one.variant.partition("@")[0] in NAMES]
    nobody_leaves = [_name(one) for one in found if one.exits == "never"]
    if len(nobody_leaves) < 2:
        raise NoRecords(f"no timelines of two of {', '.join(NAMES)} where nobody leaves")
    panels = {_name(one): _panel(one) for one in found}
    cell = found[0].cell
    drawn = {
        "title": _title(panels, nobody_leaves),
        "stamp": stamp(found, f"{cell['model']}, {cell['dtype']}, batch {cell['batch']}. {HOW}"),
        "panels": panels,
    }
    return _figure(drawn), drawn


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


def _title(panels: Mapping[str, Any], nobody_leaves: Sequence[str]) -> str:
    """Compare the first and the last way to run of those that compute the same."""
    said = []
    for name in (nobody_leaves[0], nobody_leaves[-1]):
        busy = " and ".join(f"{share:.0f}" for share in panels[name]["busy_percent"])
        said.append(f"{panels[name]['span_ms']:.1f} ms {name.partition(',')[0]}, GPUs compute {busy} % of it")
    return f"One request: {said[0]};\n{said[1]}"


def _figure(drawn: Mapping[str, Any]) -> Figure:
    panels = drawn["panels"]
    figure = new_figure(1.4 + 1.3 * len(panels))
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, panel) in zip(all_axes, panels.items(), strict=True):
        _lanes(axes, name, panel)
    all_axes[-1].set_xlabel("ms since the request's first kernel")
    handles = [Patch(color=BLUE, label="kernels and copies"), Patch(color=PURPLE, alpha=0.5, label="NCCL, or waiting")]
    all_axes[0].legend(
        handles=handles, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8
    )
    return frame(figure, drawn)


def _lanes(axes: Axes, name: str, panel: Mapping[str, Any]) -> None:
    gpus = len(panel["computes"])
    for gpu in range(gpus):
        height = gpus - 1 - gpu
        axes.broken_barh(_bars(panel["exchanges"][gpu]), (height, 0.25), color=PURPLE, alpha=0.5, linewidth=0)
        axes.broken_barh(_bars(panel["computes"][gpu]), (height + 0.25, 0.5), color=BLUE, linewidth=0)
    labels = [f"GPU {gpu}, {panel['busy_percent'][gpu]:.0f} %" for gpu in range(gpus)]
    axes.set_yticks([gpus - 1 - gpu + 0.4 for gpu in range(gpus)], labels)
    axes.set_ylim(-0.1, gpus)
    note(axes, name, (0.0, 1.0), (0, 2), xycoords="axes fraction", va="bottom", fontsize=8.5, color=GREY)
    tidy(axes, "x")
    axes.tick_params(axis="y", length=0)


def _bars(intervals: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return [(begin, end - begin) for begin, end in intervals]
