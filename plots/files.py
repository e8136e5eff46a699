"""Writes figures to files: PNG, SVG, and JSON with the numbers that are drawn."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ..autotune.records.output import replacing


def save_figure(figure: Figure, drawn: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write ``stem``.png, .svg and .json; each replaces an older one only when it is complete."""
    figure.draw_without_rendering()  # lays out once for both pictures, which takes as long as either
    figure.set_layout_engine("none")
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg, numbers = paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg", "json")]
    # without the salt and with the metadata the same figure gives other bytes each time, a change for version control
    with matplotlib.rc_context({"svg.hashsalt": "auxhead"}):
        with replacing(png) as unfinished:
            figure.savefig(unfinished, format="png", dpi=200, metadata={"Software": None})
        with replacing(svg) as unfinished:
            figure.savefig(unfinished, format="svg", dpi=100, metadata={"Date": None})
    with replacing(numbers) as unfinished:
        unfinished.write_text(json.dumps(drawn, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return paths
