"""Ranks of launch configurations alone against those in situ, and the differences that noise allows to see."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...autotune.records.comparison import DECIDING, NEGLIGIBLE
from ..records import NoRecords, rounds, stamp
from ..style import BLUE, GREY, ORANGE, PALE, frame, new_figure, tidy
from ..sweep_heads import Head, Swept, over, over_rule, read_swept

#: Reads what ``draw`` draws.
read = read_swept
#: Verdicts on a configuration that is slower alone than the winner, compared with it in the network.
FASTER, SAME, SLOWER = "surely faster in the network", "no difference beyond noise", "surely slower, as alone"
COLOURS = {SLOWER: BLUE, SAME: GREY, FASTER: ORANGE}
MARKERS = ("o", "s", "^", "D", "v")
#: Ranks that are counted each for itself; further ones, of which few heads have any, go with the last.
MOST_RANKS = 8
#: Percent up to which the axis of times alone is linear, as far as most points lie, and ticks beyond.
_LINEAR, _TICKS = 10, (0, 5, 10, 20, 50, 100, 200)


def draw(swept: Swept) -> tuple[Figure, dict[str, Any]]:
    """Draw the figure, and return it with the numbers in it."""
    heads = [drawn for head in swept.heads if (drawn := _head(head))]
    if not heads:
        raise NoRecords("no head of which two configurations were measured both alone and in the network")
    others = [one for head in heads for one in head["configs"][1:]]
    within = sum(one["verdict"] == SAME for one in others)
    lost = sum(any(one["verdict"] == FASTER for one in head["configs"]) for head in heads)
    correlation = float(np.mean([head["rank_correlation"] for head in heads]))
    models = ", ".join(sorted({head["model"] for head in heads}))
    in_situ = [one for one in swept.records if one.protocol["place"] == "network"]
    drawn = {
        "title": (
            f"In {lost} of {len(heads)} heads the configuration fastest alone loses in the network;\n"
            f"mean rank correlation {correlation:.2f}, and {within} of {len(others)} differences there lie within noise"
        ),
        "stamp": stamp(
            swept.records,
            f"{models}, the whole network with one head changed; {rounds(in_situ)}. In the network: the rule's "
            "configuration and the fastest few alone.\n"
            f"Surely: by {100 * NEGLIGIBLE:.1f} % or more and outside a {100 * DECIDING:.1f} % interval over captures "
            "and rounds (bars), widened for the number of configurations.",
        ),
        "heads_lost": lost,
        "mean_rank_correlation": correlation,
        "rank_counts": _rank_counts(heads),
        "heads": heads,
    }
    return redraw(drawn), drawn


def _head(head: Head) -> dict[str, Any] | None:
    """Return the numbers of a head that are drawn, of configurations in both places; None if there are not two."""
    both = [name for name in head.alone if name in head.network]
    if len(both) < 2:
        return None
    alone, network = ({name: over_rule(measured[name]) for name in both} for measured in (head.alone, head.network))
    by_alone, by_network = (sorted(both, key=ratios.__getitem__) for ratios in (alone, network))
    first = by_alone[0]
    configs = []
    for name in by_alone:
        compared = over(head.network[name], head.network[first], len(both))
        sure = name != first and not compared.is_tie
        configs.append(
            {
                "config": name,
                "alone_us": head.alone[name].median_us,
                "network_us": head.network[name].median_us,
                "alone_over_rule": alone[name],
                "network_over_rule": network[name],
                "rank_alone": by_alone.index(name) + 1,
                "rank_network": by_network.index(name) + 1,
                "alone_over_fastest_alone_percent": 100 * (alone[name] / alone[first] - 1),
                "network_over_fastest_alone_percent": [
                    100 * (value - 1) for value in (compared.median_ratio, compared.low, compared.high)
                ],
                "verdict": (FASTER if compared.median_ratio < 1 else SLOWER) if sure else SAME,
            }
        )
    ranks = np.array([[one["rank_alone"], one["rank_network"]] for one in configs])
    return {
        "head": f"{head.network_name}, {head.name}",
        **{name: head.cell[name] for name in ("model", "dtype", "tap")},
        "batch": head.cell["samples"],
        "classes": head.cell["classes"],
        "rank_correlation": float(np.corrcoef(ranks.T)[0, 1]),
        "configs": configs,
    }


def _rank_counts(heads: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Count, in [rank alone][rank in the network], up to ``MOST_RANKS``."""
    most = min(max(len(head["configs"]) for head in heads), MOST_RANKS)
    counts = np.zeros((most, most), int)
    for one in (one for head in heads for one in head["configs"]):
        counts[min(one["rank_alone"], most) - 1, min(one["rank_network"], most) - 1] += 1
    return list(counts.tolist())


def redraw(drawn: Mapping[str, Any]) -> Figure:
    """Draw the numbers that ``draw`` returned."""
    figure = new_figure(4.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.75))
    _draw_counts(left, drawn["rank_counts"], any(len(head["configs"]) > MOST_RANKS for head in drawn["heads"]))
    _draw_points(right, drawn["heads"])
    return frame(figure, drawn)


def _draw_counts(axes: Axes, counts: Sequence[Sequence[int]], further: bool) -> None:
    """Draw the matrix; ``further``: whether its last ranks are those of further ones, too."""
    most = max(map(max, counts))
    axes.imshow(counts, cmap="Blues", vmin=0, vmax=1.3 * most)
    for row, line in enumerate(counts):
        for column, count in enumerate(line):
            weight = "bold" if row == column else "normal"
            colour = "white" if count > 0.7 * most else "black"
            axes.text(column, row, str(count), ha="center", va="center", fontweight=weight, color=colour)
    ranks = [str(rank + 1) for rank in range(len(counts))]
    ranks[-1] += "+" if further else ""
    axes.set_xticks(range(len(counts)), ranks)
    axes.set_yticks(range(len(counts)), ranks)
    axes.set_xlabel("rank in the network (by median)")
    axes.set_ylabel("rank alone")
    axes.set_title("heads with these two ranks;\nif ranks agreed: only the diagonal", fontsize=10, loc="left")
    axes.tick_params(length=0)


def _draw_points(axes: Axes, heads: Sequence[Mapping[str, Any]]) -> None:
    batches = sorted({head["batch"] for head in heads})
    limit = 100 * NEGLIGIBLE
    axes.axhspan(-limit, limit, color=PALE, alpha=0.6, linewidth=0)
    axes.axhline(0, color="black", linewidth=1)
    for verdict, (index, batch) in product((SAME, SLOWER, FASTER), enumerate(batches)):
        of_batch = [one for head in heads if head["batch"] == batch for one in head["configs"][1:]]
        drawn = [one for one in of_batch if one["verdict"] == verdict]
        if drawn:
            over, low, high = np.array([one["network_over_fastest_alone_percent"] for one in drawn]).T
            axes.errorbar(
                [one["alone_over_fastest_alone_percent"] for one in drawn],
                over,
                None if verdict == SAME else [over - low, high - over],  # hundreds of bars would hide what differs
                color=COLOURS[verdict], marker=MARKERS[index % len(MARKERS)],
                markersize=5.5, elinewidth=0.8, alpha=0.55 if verdict == SAME else 1.0, linestyle="",
            )  # fmt: skip
    for verdict, colour in COLOURS.items():
        count = sum(one["verdict"] == verdict for head in heads for one in head["configs"][1:])
        axes.plot([], [], "o", color=colour, label=f"{verdict} ({count})")
    for batch, marker in zip(batches, MARKERS, strict=False):
        axes.plot([], [], marker, color="black", markerfacecolor="white", label=f"batch {batch}")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.22 * (high - low))  # room for the legend
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    axes.set_xscale("symlog", linthresh=_LINEAR)
    axes.set_xlim(left=-_LINEAR / 20)
    axes.set_xticks(_TICKS, map(str, _TICKS))
    axes.set_xlabel("time alone, % over the head's fastest alone")
    axes.set_ylabel("time of the network, %\nover that with the fastest alone")
    axes.set_title("each other configuration of each head", fontsize=10, loc="left")
    tidy(axes, "both")
