"""The house style: what all figures have in common."""

import textwrap
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

#: Okabe and Ito's colours, told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6E6E6E"
PURPLE, SKY, AMBER = "#CC79A7", "#56B4E9", "#E69F00"
#: Of grids and of what is only there to guide the eye.
PALE = "#E0E0E0"
#: Inches; at 100 pixels an inch what a README shows without scaling.
WIDTH = 8.0
#: Characters of a line below a figure that fit.
_STAMP_CHARACTERS = 145


class Line(NamedTuple):
    """How a variant is drawn."""

    label: str
    colour: str
    dashes: str
    marker: str


def new_figure(height_inches: float) -> Figure:
    """Return a figure that no global state knows of, as wide as a README; 100 pixels an inch as SVG, 200 as PNG."""
    figure = Figure(figsize=(WIDTH, height_inches), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, grid: Literal["x", "y", "both"] = "y") -> None:
    """Take away what says nothing, and draw a pale grid along ``grid`` ("x", "y" or "both")."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def frame(figure: Figure, drawn: Mapping[str, Any]) -> Figure:
    """Write ``drawn["title"]``, the finding, above all axes and ``drawn["stamp"]`` small below them."""
    figure.suptitle(drawn["title"], fontsize=12, fontweight="bold", x=0.01, ha="left")
    lines = [part for line in drawn["stamp"].splitlines() for part in textwrap.wrap(line, _STAMP_CHARACTERS)]
    figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.01, ha="left")
    return figure
