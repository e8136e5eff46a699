"""``BeyondCalibration``: what ``auxhead calibrate`` is handed of packages and folders it may not import."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class BeyondCalibration(NamedTuple):
    """Functions of packages and folders that calibration may not import."""

    load_network: Callable[[Path, str | None, str | None], Any]
    """Loads a checkpoint, given its folder, what makes its backbone (None: a known one) and modules of its heads."""
    draw: Callable[[Mapping[str, Any]], tuple[Any, dict[str, Any]]]
    """Draws the content of ``report.json``; returns a figure and the numbers in it."""
    save_figure: Callable[[Any, Mapping[str, Any], Path], object]
    """Writes a figure and its numbers to files that begin with a path: PNG, SVG and JSON."""
