"""The style of all figures: colours, size, axes, title and small print; and their files, PNG, SVG and JSON."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..model.basics.files import replacing

#: Okabe and Ito's colours, told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6E6E6E"
PURPLE, SKY, AMBER = "#CC79A7", "#56B4E9", "#E69F00"
#: For grids and other guides to the eye.
PALE = "#E0E0E0"
#: Inches; at 100 pixels an inch a README shows it unscaled.
WIDTH = 8.0
#: Characters that fit in a line of the small print.
_STAMP_CHARACTERS = 145


class Line(NamedTuple):
    """Label, colour, dashes and marker of a variant."""

    label: str
    colour: str
    dashes: str
    marker: str

    @property
    def looks(self) -> dict[str, Any]:
        """Its arguments for matplotlib's ``plot`` and ``errorbar``."""
        return {"label": self.label, "color": self.colour, "linestyle": self.dashes, "marker": self.marker}


def new_figure(height_inches: float) -> Figure:
    """Return an empty figure as wide as a README, unknown to pyplot's global state."""
    figure = Figure(figsize=(WIDTH, height_inches), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, grid: Literal["x", "y", "both"] = "y", title: str = "", **properties: Any) -> None:
    """Remove the spines at the top and right, draw a pale grid, and set a title above and what ``Axes.set`` takes."""
    if title:
        heading(axes, title)
    axes.set(**properties)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **looks: Any) -> None:
    """Write text beside a point, ``offset`` of it in points of 1/72 inch."""
    axes.annotate(text, at, offset, textcoords="offset points", **looks)


def heading(axes: Axes, text: str) -> None:
    """Write what a panel shows above it."""
    axes.set_title(text, fontsize=10, loc="left")


def row_of_panels(figure: Figure, height_ratios: tuple[float, float], panels: int) -> tuple[Axes, list[Axes]]:
    """Return axes for a legend below, and those of panels side by side above."""
    grid = figure.add_gridspec(2, panels, height_ratios=height_ratios)
    row = [figure.add_subplot(grid[0, column]) for column in range(panels)]
    return figure.add_subplot(grid[1, :]), row


def bars(intervals: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return intervals of begin and end as ``broken_barh`` takes them, begin and length."""
    return [(begin, end - begin) for begin, end in intervals]


def line_with_band(
    axes: Axes, line: Line, x: Sequence[float], y: Sequence[Mapping[str, float]], ends: tuple[str, str]
) -> None:
    """Draw the medians of ``y`` as a line, and between two of its percentiles a band."""
    axes.plot(x, [one["median"] for one in y], **line.looks, markersize=4.5, linewidth=1.6)
    low, high = ([one[end] for one in y] for end in ends)
    axes.fill_between(x, low, high, color=line.colour, alpha=0.25, linewidth=0)


def legend_beside(axes: Axes, drawn: Axes, ncols: int, fontsize: float = 8.5, **looks: float) -> None:
    """Fill ``axes`` with the legend of what is drawn in another one."""
    axes.axis("off")
    handles, labels = drawn.get_legend_handles_labels()
    axes.legend(handles, labels, loc="center", ncols=ncols, frameon=False, fontsize=fontsize, **looks)


def frame(figure: Figure, numbers: Mapping[str, Any]) -> Figure:
    """Write the title ``numbers["title"]`` above all axes and the small print ``numbers["stamp"]`` below them."""
    figure.suptitle(numbers["title"], fontsize=12, fontweight="bold", x=0.01, ha="left")
    lines = [part for line in numbers["stamp"].splitlines() for part in textwrap.wrap(line, _STAMP_CHARACTERS)]
    figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.01, ha="left")
    return figure


def save_figure(figure: Figure, numbers: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write ``stem``.png, .svg and .json; each replaces an older one only when it is complete."""
    figure.draw_without_rendering()  # lays out once for both pictures, which takes as long as either
    figure.set_layout_engine("none")
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg, text = paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "json")]
    # without the salt and with the metadata the same figure gives other bytes each time, a change for version control
    with matplotlib.rc_context({"svg.hashsalt": "auxhead"}):
        with replacing(png) as unfinished:
            figure.savefig(unfinished, format="png", dpi=200, metadata={"Software": None})
        with replacing(svg) as unfinished:
            figure.savefig(unfinished, format="svg", dpi=100, metadata={"Date": None})
    with replacing(text) as unfinished:
        unfinished.write_text(json.dumps(numbers, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return paths
