"""The tuning landscape: how long a head takes alone, over two fields of its launch configuration."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from ...autotune.records.comparison import DECIDING, NEGLIGIBLE
from ..records import NoRecords, rounds, stamp
from ..style import ORANGE, PALE, frame, new_figure
from ..sweep_heads import FIELDS, Head, Swept, over, over_rule, read_swept

#: Reads what ``draw`` draws.
read = read_swept
#: The fields of a LaunchConfig across and up, and what they are: most that was tried differs in them.
ACROSS, UP = FIELDS
ACROSS_LABEL, UP_LABEL = "warps", "channels a\nprogram"
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


def draw(swept: Swept) -> tuple[Figure, dict[str, Any]]:
    """Draw the figure, and return it with the numbers in it.

    Drawn are the heads of the smallest and of the largest batch of one network: the one most was tried for.
    """
    found = [head for head in swept.heads if len(head.tried) > 1]
    if not found:
        raise NoRecords("no head of which two configurations were measured alone")
    ((network, _),) = Counter(head.network_name for head in found for _ in head.tried).most_common(1)
    found = [head for head in found if head.network_name == network]
    batches = [head.cell["samples"] for head in found]
    heads = [_head(head) for head in found if head.cell["samples"] in (min(batches), max(batches))]
    others = [one for head in heads for one in head["configs"][1:]]
    typical = statistics.median(one["over_fastest"] for one in others)
    noise = statistics.median(one["noise_percent"] for one in others)
    rule_best = sum(any(one["rule"] and one["within_noise"] for one in head["configs"]) for head in heads)
    drawn = {
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
    return redraw(drawn), drawn


def _head(head: Head) -> dict[str, Any]:
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


def redraw(drawn: Mapping[str, Any]) -> Figure:
    """Draw the numbers that ``draw`` returned."""
    heads = drawn["heads"]
    rows = -(-len(heads) // COLUMNS)
    figure = new_figure(2.1 + 1.55 * rows)
    grid = figure.add_gridspec(rows + 1, COLUMNS, height_ratios=(*[1.0] * rows, 0.16))
    norm = LogNorm(TICKS[0], TICKS[-1])
    values = {field: sorted({one[field] for head in heads for one in head["configs"]}) for field in (ACROSS, UP)}
    for index, head in enumerate(heads):
        axes = figure.add_subplot(grid[index // COLUMNS, index % COLUMNS])
        _panel(axes, head, values[ACROSS], values[UP], norm)
        axes.tick_params(labelleft=index % COLUMNS == 0, labelbottom=index + COLUMNS >= len(heads))
        axes.set_xlabel(ACROSS_LABEL if index + COLUMNS >= len(heads) else "")
        axes.set_ylabel(UP_LABEL if index % COLUMNS == 0 else "")
    legend = figure.add_subplot(grid[rows, :2])
    legend.axis("off")
    marks = {
        f"fastest, or within noise of it ({100 * DECIDING:.1f} %: ±{drawn['noise_percent']:.1f} %)": Patch(
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
    return frame(figure, drawn)


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
    axes.set_xlim(-0.5, len(across) - 0.5)
    axes.set_ylim(-0.5, len(up) - 0.5)
    axes.set_xticks(range(len(across)), [str(value) for value in across])
    axes.set_yticks(range(len(up)), [str(value) for value in up])
    axes.tick_params(length=0, labelsize=7.5)
    axes.spines[:].set_color(PALE)
    axes.set_title(head["head"], fontsize=8, loc="left")
