"""Figures as files: PNG and SVG, and beside them the numbers that are drawn."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

#: Okabe and Ito's colours, told apart with any kind of colour vision.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6E6E6E"


class BadRecord(ValueError):
    """A record that a figure cannot be drawn from: names the file or field and what is wanted, in one line."""


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Return a figure that no global state knows of; 100 pixels an inch as SVG, 200 as PNG."""
    figure = Figure(figsize=(width_inches, height_inches), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, drawn: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write ``stem``.png, .svg and .json; each is complete or the one that was there before."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in ("png", "svg", "json"):
        path = stem.with_name(f"{stem.name}.{kind}")
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        if kind == "json":
            unfinished.write_text(json.dumps(drawn, indent=2) + "\n", encoding="utf-8")
        else:
            # the same figure gives the same bytes, so that version control sees no change where there is none
            with matplotlib.rc_context({"svg.hashsalt": "auxhead"}):
                metadata = {"Date": None} if kind == "svg" else {"Software": None}
                figure.savefig(unfinished, format=kind, dpi=200 if kind == "png" else 100, metadata=metadata)
        os.replace(unfinished, path)
        paths.append(path)
    return paths


def read_record(path: Path) -> dict[str, Any]:
    """Read one JSON object.

    Raises:
        BadRecord: no such file, or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadRecord(f"{path}: no such file, wants a report.json") from None
    except OSError as error:
        raise BadRecord(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BadRecord(f"{path}: is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise BadRecord(f"{path}: holds a JSON {type(content).__name__}, wants an object")
    return content
