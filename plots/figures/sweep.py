"""Figure of sweeps: "landscape", times of heads alone over two fields of their launch configurations."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from ...autotune.records.comparison import DECIDING, NEGLIGIBLE, Difference, compare_runs
from ...autotune.records.decisions import (
    Measurement,
    by_shape,
    joint_confidence,
    measurement,
    of_last_kernel,
    sweep_records,
)
from ...autotune.records.record import Record, bad_record
from ..records import NoRecords, rounds, stamp
from ..style import ORANGE, PALE, frame, new_figure

#: The fields of a LaunchConfig across and up, and what they are: most that was tried differs in them.
ACROSS, UP = "num_warps", "block_c"
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
#: Digits of a ratio: numpy's logarithms differ in their last one from processor to processor, what is drawn must not.
_DIGITS = 9


class Head(NamedTuple):
    """One head of a sweep."""

    cell: dict[str, Any]
    """Fields of its shape."""
    tried: dict[str, Measurement]
    """Measurements by the names of configurations, also of those that were only looked at."""

    @property
    def kind(self) -> str:
        """What the heads of one network have in common."""
        return f"{self.cell['dtype']}, {self.cell['classes']:,} classes"

    @property
    def name(self) -> str:
        """The head's size, and its batch."""
        size = self.cell["height"] * self.cell["width"]
        return f"{self.cell['channels']}x{size}, batch {self.cell['samples']}"


def _heads(records: Iterable[Record]) -> list[Head]:
    """Return the heads of the kernel that was swept last, in order of batch size, classes and channels."""
    timed = by_shape(one for one in of_last_kernel(records) if one.error is None)
    heads = [Head(its[-1].cell, _tried(its)) for its in timed.values()]
    return sorted(heads, key=lambda head: [head.cell[name] for name in ("samples", "classes", "channels", "dtype")])


def _tried(records: Iterable[Record]) -> dict[str, Measurement]:
    """Return what was timed beside the last one's rule; of a configuration timed several times, of the most rounds."""
    found = []
    for record in records:
        config = record.protocol.get("config")
        if not isinstance(config, dict) or not all(isinstance(config.get(name), int) for name in (ACROSS, UP)):
            raise bad_record(record, f"protocol.config: got {config!r:.60}, wants fields and their values")
        found.append(measurement(record))
    by_rounds = sorted(found, key=lambda one: one.rounds)
    return {one.variant: one for one in by_rounds if one.rule == found[-1].rule}


def _over_rule(one: Measurement) -> float:
    """Return a configuration's time over that of the rule's."""
    return round(one.paired.over_baseline, _DIGITS)


def _over(one: Measurement, other: Measurement, among: int) -> Difference:
    """Compare two configurations of one head; intervals hold together for ``among`` of them."""
    found = compare_runs(one.paired, other.paired, confidence=joint_confidence(among))
    return Difference(*(round(ratio, _DIGITS) for ratio in found))


def landscape_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return what was tried of heads, of the smallest and the largest batch of the kind most was tried for."""
    swept = sweep_records(records)
    found = [head for head in _heads(swept) if len(head.tried) > 1]
    if not found:
        raise NoRecords("no head of which two configurations were measured")
    ((kind, _),) = Counter(head.kind for head in found for _ in head.tried).most_common(1)
    found = [head for head in found if head.kind == kind]
    batches = [head.cell["samples"] for head in found]
    heads = [_drawn(head) for head in found if head.cell["samples"] in (min(batches), max(batches))]
    others = [one for head in heads for one in head["configs"][1:]]
    typical = statistics.median(one["over_fastest"] for one in others)
    noise = statistics.median(one["noise_percent"] for one in others)
    rule_best = sum(any(one["rule"] and one["within_noise"] for one in head["configs"]) for head in heads)
    rule_near = sum(_rule_is_in_a_tied_cell(head["configs"]) for head in heads)
    return {
        "title": (
            f"Alone, what was tried takes {typical:.1f} times a head's fastest (median); the rule's\n"
            f"two fields (circles) are among the fastest in {rule_near} of {len(heads)} heads, all in {rule_best}"
        ),
        "stamp": stamp(
            swept,
            f"{kind}; {statistics.median(len(head['configs']) for head in heads):.0f} configurations tried a head "
            f"(median), {rounds(swept)}; device time of one head alone, back to back. A cell: the fastest with "
            "its fields.\n"
            f"Within noise: less than {100 * NEGLIGIBLE:.1f} % or inside the {100 * DECIDING:.1f} % interval over "
            "captures and rounds, widened for the number of configurations.",
        ),
        "kind": kind,
        "fields": [ACROSS, UP],
        "noise_percent": noise,
        "heads": heads,
    }


def _rule_is_in_a_tied_cell(configs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the rule's two fields are those of a configuration that ties with the fastest."""
    own = {(one[ACROSS], one[UP]) for one in configs if one["rule"]}
    return any(one["within_noise"] and (one[ACROSS], one[UP]) in own for one in configs)


def _drawn(head: Head) -> dict[str, Any]:
    """Return the numbers of a head that are drawn, the fastest configuration first."""
    order = sorted(head.tried.values(), key=_over_rule)
    fastest = order[0]
    configs = []
    for one in order:
        compared = _over(one, fastest, len(order))
        configs.append(
            {
                "config": one.variant,
                ACROSS: one.config[ACROSS],
                UP: one.config[UP],
                "alone_us": round(one.median_us, 3),
                "over_fastest": round(_over_rule(one) / _over_rule(fastest), 4),
                "noise_percent": round(100 * (compared.high / compared.median_ratio - 1), 2),
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
