"""Figures of sweeps: "ranks", of configurations alone and in the network, and "landscape", over two of their fields."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from ...autotune.records.comparison import DECIDING, NEGLIGIBLE
from ..records import NoRecords, rounds, stamp
from ..style import BLUE, GREY, ORANGE, PALE, frame, heading, new_figure, tidy
from ..sweep_heads import FIELDS, Head, Swept, over, over_rule, read_swept

#: Reads what both are drawn from.
read = read_swept
#: Verdicts on a configuration that is slower alone than the winner, compared with it in the network.
FASTER, SAME, SLOWER = "surely faster in the network", "no difference beyond noise", "surely slower, as alone"
VERDICTS = {SLOWER: BLUE, SAME: GREY, FASTER: ORANGE}
MARKERS = ("o", "s", "^", "D", "v")
#: Ranks that are counted each for itself; further ones, of which few heads have any, go with the last.
MOST_RANKS = 8
#: Percent up to which the axis of times alone is linear, as far as most points lie, and ticks beyond.
_LINEAR, _TICKS = 10, (0, 5, 10, 20, 50, 100, 200)
#: The fields of a LaunchConfig across and up, and what they are: most that was tried differs in them.
ACROSS, UP = FIELDS
COLUMNS = 4
#: Bright for fast: the eye goes where tuning should.
COLOURS = colormaps["viridis_r"]
#: Times over the fastest; the colours end there.
TICKS = (1.0, 1.5, 2.0, 3.0, 4.0)
#: Looks of a tie with the fastest, of the rule's fields, and of what was not tried.
TIED: dict[str, Any] = {"hatch": "////", "linewidth": 1.4, "edgecolor": ORANGE}
RULE: dict[str, Any] = {
    "marker": "o", "markersize": 6, "markerfacecolor": "none", "markeredgecolor": "black", "linestyle": "",
}  # fmt: skip
UNTRIED: dict[str, Any] = {"marker": "x", "markersize": 3, "color": "#B0B0B0", "linestyle": ""}


def ranks_numbers(swept: Swept) -> dict[str, Any]:
    """Return, of each head, the ranks of what was measured alone and in the network, and how the times differ there."""
    heads = [ranked for head in swept.heads if (ranked := _ranked(head))]
    if not heads:
        raise NoRecords("no head of which two configurations were measured both alone and in the network")
    others = [one for head in heads for one in head["configs"][1:]]
    within = sum(one["verdict"] == SAME for one in others)
    lost = sum(any(one["verdict"] == FASTER for one in head["configs"]) for head in heads)
    correlation = float(np.mean([head["rank_correlation"] for head in heads]))
    models = ", ".join(sorted({head["model"] for head in heads}))
    in_situ = [one for one in swept.records if one.protocol["place"] == "network"]
    return {
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


def _ranked(head: Head) -> dict[str, Any] | None:
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
        differs = name != first and not compared.is_tie
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
                "verdict": (FASTER if compared.median_ratio < 1 else SLOWER) if differs else SAME,
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


def ranks_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw how often heads have two ranks, and each configuration's time in the network over its time alone."""
    figure = new_figure(4.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.75))
    _draw_counts(left, numbers["rank_counts"], any(len(head["configs"]) > MOST_RANKS for head in numbers["heads"]))
    _draw_points(right, numbers["heads"])
    return frame(figure, numbers)


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
    axes.set(xlabel="rank in the network (by median)", ylabel="rank alone")
    heading(axes, "heads with these two ranks;\nif ranks agreed: only the diagonal")
    axes.tick_params(length=0)


def _draw_points(axes: Axes, heads: Sequence[Mapping[str, Any]]) -> None:
    batches = sorted({head["batch"] for head in heads})
    limit = 100 * NEGLIGIBLE
    axes.axhspan(-limit, limit, color=PALE, alpha=0.6, linewidth=0)
    axes.axhline(0, color="black", linewidth=1)
    for verdict, (index, batch) in product((SAME, SLOWER, FASTER), enumerate(batches)):
        of_batch = [one for head in heads if head["batch"] == batch for one in head["configs"][1:]]
        shown = [one for one in of_batch if one["verdict"] == verdict]
        if shown:
            over, low, high = np.array([one["network_over_fastest_alone_percent"] for one in shown]).T
            axes.errorbar(
                [one["alone_over_fastest_alone_percent"] for one in shown],
                over,
                None if verdict == SAME else [over - low, high - over],  # hundreds of bars would hide what differs
                color=VERDICTS[verdict], marker=MARKERS[index % len(MARKERS)],
                markersize=5.5, elinewidth=0.8, alpha=0.55 if verdict == SAME else 1.0, linestyle="",
            )  # fmt: skip
    for verdict, colour in VERDICTS.items():
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
    y = "time of the network, %\nover that with the fastest alone"
    tidy(
        axes,
        "both",
        "each other configuration of each head",
        xlabel="time alone, % over the head's fastest alone",
        ylabel=y,
    )


def landscape_numbers(swept: Swept) -> dict[str, Any]:
    """Return what was tried of heads alone, of the smallest and the largest batch of the network most was tried for."""
    found = [head for head in swept.heads if len(head.tried) > 1]
    if not found:
        raise NoRecords("no head of which two configurations were measured alone")
    found = [head for head in found if head.network] or found  # those of no network have little in common
    ((network, _),) = Counter(head.network_name for head in found for _ in head.tried).most_common(1)
    found = [head for head in found if head.network_name == network]
    batches = [head.cell["samples"] for head in found]
    heads = [_tried(head) for head in found if head.cell["samples"] in (min(batches), max(batches))]
    others = [one for head in heads for one in head["configs"][1:]]
    typical = statistics.median(one["over_fastest"] for one in others)
    noise = statistics.median(one["noise_percent"] for one in others)
    rule_best = sum(any(one["rule"] and one["within_noise"] for one in head["configs"]) for head in heads)
    return {
        "title": (
            f"Alone, a configuration tried takes {typical:.1f} times as long as its head's fastest (median);\n"
            f"the rule's is the fastest, or ties with it, in {rule_best} of {len(heads)} heads"
        ),
        "stamp": stamp(
            swept.records,
            f"{network}; {statistics.median(len(head['configs']) for head in heads):.0f} configurations tried a head "
            f"(median), {rounds(swept.records)}; device time of one head alone, back to back. A cell: the fastest with "
            "its fields.\n"
            f"Within noise: less than {100 * NEGLIGIBLE:.1f} % or inside the {100 * DECIDING:.1f} % interval over "
            "captures and rounds, widened for the number of configurations.",
        ),
        "network": network,
        "fields": [ACROSS, UP],
        "noise_percent": noise,
        "heads": heads,
    }


def _tried(head: Head) -> dict[str, Any]:
    """Return the numbers of a head that are drawn, the fastest configuration first."""
    order = sorted(head.tried.values(), key=over_rule)
    fastest = order[0]
    configs = []
    for one in order:
        compared = over(one, fastest, len(order))
        configs.append(
            {
                "config": one.variant,
                ACROSS: one.config[ACROSS],
                UP: one.config[UP],
                "alone_us": one.median_us,
                "over_fastest": over_rule(one) / over_rule(fastest),
                "noise_percent": 100 * (compared.high / compared.median_ratio - 1),
                "within_noise": one is fastest or compared.is_tie,
                "rule": one.variant == one.rule,
            }
        )
    return {"head": head.name, "batch": head.cell["samples"], "configs": configs}


def landscape_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw a panel a head, coloured by time over two fields of the configuration."""
    heads = numbers["heads"]
    rows = -(-len(heads) // COLUMNS)
    figure = new_figure(2.1 + 1.55 * rows)
    grid = figure.add_gridspec(rows + 1, COLUMNS, height_ratios=(*[1.0] * rows, 0.16))
    norm = LogNorm(TICKS[0], TICKS[-1])
    values = {field: sorted({one[field] for head in heads for one in head["configs"]}) for field in (ACROSS, UP)}
    for index, head in enumerate(heads):
        axes = figure.add_subplot(grid[index // COLUMNS, index % COLUMNS])
        _panel(axes, head, values[ACROSS], values[UP], norm)
        is_left, is_low = index % COLUMNS == 0, index + COLUMNS >= len(heads)
        axes.tick_params(labelleft=is_left, labelbottom=is_low)
        axes.set(xlabel="warps" if is_low else "", ylabel="channels a\nprogram" if is_left else "")
    legend = figure.add_subplot(grid[rows, :2])
    legend.axis("off")
    marks = {
        f"fastest, or within noise of it ({100 * DECIDING:.1f} %: ±{numbers['noise_percent']:.1f} %)": Patch(
            facecolor=COLOURS(0.0), **TIED
        ),
        "these two fields by the rule": Line2D([], [], **RULE),
        "not tried": Line2D([], [], **UNTRIED),
    }
    legend.legend(marks.values(), marks.keys(), loc="center left", frameon=False, fontsize=8.5, borderaxespad=0)
    bar = figure.colorbar(
        ScalarMappable(norm, COLOURS), cax=figure.add_subplot(grid[rows, 2:]), orientation="horizontal", extend="max"
    )
    bar.set_ticks(TICKS, labels=[f"{tick:g}" for tick in TICKS])
    bar.minorticks_off()
    bar.set_label("time alone over that of the head's fastest", fontsize=9)
    return frame(figure, numbers)


def _panel(axes: Axes, head: Mapping[str, Any], across: Sequence[int], up: Sequence[int], norm: LogNorm) -> None:
    cells: dict[tuple[int, int], Mapping[str, Any]] = {}
    for one in head["configs"]:  # the fastest first
        cell = across.index(one[ACROSS]), up.index(one[UP])
        cells.setdefault(cell, one)
        if one["rule"]:
            axes.plot(*cell, **RULE)
    for (column, row), fastest in cells.items():
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, color=COLOURS(norm(fastest["over_fastest"])), linewidth=0))
        if fastest["within_noise"]:
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, **TIED))
    untried = [cell for cell in product(range(len(across)), range(len(up))) if cell not in cells]
    axes.plot([column for column, _ in untried], [row for _, row in untried], **UNTRIED)
    axes.set(xlim=(-0.5, len(across) - 0.5), ylim=(-0.5, len(up) - 0.5))
    axes.set_xticks(range(len(across)), map(str, across))
    axes.set_yticks(range(len(up)), map(str, up))
    axes.tick_params(length=0, labelsize=7.5)
    axes.spines[:].set_color(PALE)
    axes.set_title(head["head"], fontsize=8, loc="left")
