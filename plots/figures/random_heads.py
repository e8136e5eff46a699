"""Figure "random-heads": plain PyTorch's time over the fused head's, of heads drawn at random, kind by kind."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from ...autotune.records.heads import KINDS, RANDOM, Measured, finding, head_in_words, last_runs, ratio_to
from ...autotune.records.record import Record
from ..records import NoRecords, rounds, stamp
from ..style import AMBER, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, frame, new_figure, tidy

#: Colours of the kinds.
_COLOURS = dict(zip(KINDS, (BLUE, SKY, GREEN, ORANGE, PURPLE, AMBER, GREY, BLUE, GREEN), strict=True))
#: Of the place of a kind, the part in which its heads lie.
_WIDTH = 0.8
_TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def random_heads_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return the ratios of all heads, by kind the slowest first, of the last run of each."""
    heads = [run for run in last_runs(records, RANDOM) if ratio_to(run, "eager")]
    if not heads:
        raise NoRecords("no random head that was timed beside plain PyTorch")
    by_kind = {kind: [_point(run) for run in heads if run["fused"].cell["kind"] == kind] for kind in KINDS}
    seeds = sorted({run["fused"].cell["seed"] for run in heads})
    fused = [run["fused"] for run in heads]
    return {
        "title": re.sub(r" \(.*?\)", "", finding(heads)).replace("; ", ",\nand "),
        "kinds": {kind: sorted(points, key=lambda one: one["ratio"]) for kind, points in by_kind.items() if points},
        "stamp": stamp(
            fused,
            f"{len(heads)} heads of seed {', '.join(map(str, seeds))}, alone; launches back to back in a CUDA graph, "
            f"small ones from the L2 cache, both alike; {rounds(fused)}; bars: 99 % interval of the ratio",
        ),
    }


def _point(run: Measured) -> dict[str, Any]:
    eager, compiled = ratio_to(run, "eager"), ratio_to(run, "compiled")
    assert eager is not None
    cell = run["fused"].cell
    to_compiled = None if compiled is None else compiled.ratio
    return {"number": cell["number"], "head": head_in_words(cell), **eager._asdict(), "to_compiled": to_compiled}


def random_heads_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw a point for each head, kinds side by side, and the line below which a head is slower than plain PyTorch."""
    figure = new_figure(4.8)
    axes = figure.add_subplot()
    every = [one for points in numbers["kinds"].values() for one in points]
    low = min(0.5, *(min(one["low"], one["to_compiled"] or 1.0) / 1.3 for one in every))
    high = max(max(one["high"], one["to_compiled"] or 1.0) for one in every) * 1.3
    axes.axhspan(low, 1.0, color=ORANGE, alpha=0.1, linewidth=0)
    axes.axhline(1.0, color="black", linewidth=1.2)
    compiled = []
    for start, (kind, points) in enumerate(numbers["kinds"].items()):
        places = [start + (place + 0.5) / len(points) * _WIDTH for place in range(len(points))]
        lows, highs = ([one[end] for one in points] for end in ("low", "high"))
        axes.vlines(places, lows, highs, _COLOURS[kind], linewidth=0.9)
        axes.plot(places, [one["ratio"] for one in points], "o", color=_COLOURS[kind], markersize=3)
        compiled += [(at, one["to_compiled"]) for at, one in zip(places, points, strict=True) if one["to_compiled"]]
    if compiled:
        label = "torch.compile's time, of a sample"
        axes.plot(*zip(*compiled, strict=True), "D", color="black", markersize=4, markerfacecolor="none", label=label)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderpad=0, fontsize=8, frameon=False)
    tidy(axes, yscale="log", ylim=(low, high), ylabel="plain PyTorch's time over the fused head's (log)")
    axes.text(0.01, 0.02, "here the fused head is slower", transform=axes.transAxes, fontsize=8, color=ORANGE)
    axes.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    names = [
        f"{kind}\n{sum(one['ratio'] >= 1.0 for one in points)} of {len(points)}"
        for kind, points in numbers["kinds"].items()
    ]
    axes.set_xticks([start + _WIDTH / 2 for start in range(len(names))], names, fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("heads by kind, the slowest first; and how many are at least as fast as plain PyTorch", fontsize=8)
    return frame(figure, numbers)
