"""The style of all figures: colours, size, axes, title and small print."""

import textwrap
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

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


def tidy(axes: Axes, grid: Literal["x", "y", "both"] = "y") -> None:
    """Remove the spines at the top and right, and draw a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **looks: Any) -> None:
    """Write text beside a point, ``offset`` of it in points of 1/72 inch."""
    axes.annotate(text, at, offset, textcoords="offset points", **looks)


def legend_beside(axes: Axes, drawn: Axes, ncols: int, fontsize: float = 8.5, **looks: float) -> None:
    """Fill ``axes`` with the legend of what is drawn in another one."""
    axes.axis("off")
    handles, labels = drawn.get_legend_handles_labels()
    axes.legend(handles, labels, loc="center", ncols=ncols, frameon=False, fontsize=fontsize, **looks)


def frame(figure: Figure, drawn: Mapping[str, Any]) -> Figure:
    """Write the title ``drawn["title"]`` above all axes and the small print ``drawn["stamp"]`` below them."""
    figure.suptitle(drawn["title"], fontsize=12, fontweight="bold", x=0.01, ha="left")
    lines = [part for line in drawn["stamp"].splitlines() for part in textwrap.wrap(line, _STAMP_CHARACTERS)]
    figure.supxlabel("\n".join(lines), fontsize=7, color=GREY, x=0.01, ha="left")
    return figure
