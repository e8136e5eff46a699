"""Figures without the package's raw records, which are too large for a wheel."""

import json
import zlib

import pytest
from auxhead.plots.figures import registry
from auxhead.plots.figures.registry import FIGURES

try:
    import tomllib
except ImportError:  # before Python 3.11
    tomllib = pytest.importorskip("tomli")

ROOT = registry.GALLERY.parents[1]
REDRAWN = [FIGURES[name] for name in ("ranks", "landscape")]


@pytest.mark.parametrize("kind", REDRAWN, ids=lambda kind: kind.name)
def test_the_numbers_of_the_gallery_are_drawn_where_the_records_are_not_there(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "COMMITTED", tmp_path)
    figure, drawn = kind.make()
    assert drawn == json.loads((registry.GALLERY / f"{kind.name}.json").read_text())
    assert drawn["title"] in {text.get_text() for text in figure.findobj(lambda one: hasattr(one, "get_text"))}


def test_the_data_of_a_wheel_is_small_and_has_the_numbers_of_figures_without_records():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = {
        path.relative_to(ROOT)
        for package, patterns in data.items()
        if package != "*"
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    names = {path.as_posix() for path in files}
    assert {f"plots/gallery/{kind.name}.json" for kind in REDRAWN} <= names
    missing = {kind.file for kind in FIGURES.values() if f"autotune/records/{kind.file}" not in names}
    assert missing == {kind.file for kind in REDRAWN}
    assert sum(len(zlib.compress((ROOT / path).read_bytes())) for path in files) < 1_000_000
