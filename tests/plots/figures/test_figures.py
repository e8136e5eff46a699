"""Every figure drawn from the committed records equals the committed one, and its numbers are theirs."""

import gzip
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from auxhead.plots import records as plots_records
from auxhead.plots.figures import registry
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import COMMITTED
from auxhead.plots.style import save_figure
from support.command_line import plot
from support.committed_records import read_once, records

try:
    import tomllib
except ImportError:  # before Python 3.11
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[3]
GALLERY = ROOT / "plots" / "gallery"
TRACE = GALLERY / "timeline.trace.json.gz"
#: Figures that are in the gallery: those whose records are in the repository.
SHOWN = {name: kind for name, kind in FIGURES.items() if (COMMITTED / kind.file).exists()}


@pytest.fixture(scope="module")
def again():
    """Every figure, as it is drawn from the committed records, and its numbers; by name."""
    known = {}
    with pytest.MonkeyPatch.context() as patch:
        read_once(patch, plots_records)
        return {name: kind.make(None, known) for name, kind in SHOWN.items()}


def bench():
    return [one for one in records("h200/bench.jsonl") if one.kind == "bench"]


def drawn(name):
    return json.loads((GALLERY / f"{name}.json").read_text())


def same(one, other):
    """Equal but for the last digits, which depend on the processor."""
    if isinstance(one, float):
        return one == pytest.approx(other, rel=1e-6, abs=1e-6)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def parts(picture):
    """The words of an SVG and its numbers, which depend on what was laid out before in their last digits; no ids."""
    pieces = re.split(r"(-?\d+\.?\d*)", re.sub(r"\b[a-z][0-9a-f]{10}\b", "id", picture.read_text()))
    return pieces[::2], np.array(pieces[1::2], float)


@pytest.mark.parametrize("name", SHOWN)
def test_the_gallery_is_drawn_from_the_committed_records(name, again, tmp_path, monkeypatch):
    """What stands on the axes was looked at when the gallery was made; it is the same since."""
    figure, numbers = again[name]
    save, svg_alone = figure.savefig, {"png": lambda to, **_: Path(to).touch()}
    monkeypatch.setattr(figure, "savefig", lambda to, **how: svg_alone.get(how["format"], save)(to, **how))
    assert same(json.loads(json.dumps(numbers, allow_nan=False)), drawn(name))
    kept, (_, picture, _) = GALLERY / f"{name}.svg", save_figure(figure, numbers, tmp_path / name)
    if f"Matplotlib v{matplotlib.__version__}," in kept.read_text():
        (words, places), (wanted, at) = parts(picture), parts(kept)
        assert words == wanted
        np.testing.assert_allclose(places, at, rtol=0, atol=0.02)


def test_the_gallery_holds_all_figures_and_lists_them():
    wanted = {f"{name}.{kind}" for name in SHOWN for kind in ("png", "svg", "json")}
    assert {path.name for path in GALLERY.iterdir()} == wanted | {"README.md", TRACE.name}
    readme = (GALLERY / "README.md").read_text()
    listed = re.findall(r"^\| \[([a-z-]+)\]\(\1\.png\).*`auxhead-plot \1`", readme, flags=re.MULTILINE)
    assert listed == list(SHOWN) == re.findall(r"!\[\]\(([a-z-]+)\.png\)", readme)


def test_the_trace_is_that_of_the_committed_records(tmp_path):
    done = plot("perfetto", COMMITTED / "h200/overlap.jsonl", "--out", tmp_path / TRACE.name)
    assert done.exit_code == 0, done.output
    again, trace = (json.loads(gzip.decompress(path.read_bytes())) for path in (tmp_path / TRACE.name, TRACE))
    assert same(again, trace) and f"({TRACE.name})" in (GALLERY / "README.md").read_text()


def test_times_of_the_benchmark_are_those_of_records():
    points = [
        (int(classes), "never", variant, point)
        for classes, lines in drawn("latency")["classes"].items()
        for variant, its in lines.items()
        for point in its
    ]
    points += [
        (10, point["exit"], variant, {**point, "batch": int(batch)})
        for batch, lines in drawn("time-to-answer")["batches"].items()
        for variant, its in lines.items()
        for point in its
    ]
    assert len(points) > 100
    for classes, exits, variant, point in points:
        found = [
            one
            for one in bench()
            if (one.variant, one.cell["batch"], one.exits) == (variant, point["batch"], exits)
            and one.cell["classes"] == classes
            and all(point[us].items() <= getattr(one, us).items() for us in ("host_us", "device_us") if us in point)
        ]
        assert len(found) == 1
        if "bare" in point:
            assert any(point["bare"].items() <= pair.items() for pair in found[0].paired if pair["role"] == "bare")


def test_a_latency_without_its_tail_is_not_drawn():
    tails = [replace(one, host_us={**one.host_us, "p99": 9e9}) for one in bench() if one.error is None]
    without = [
        replace(one, host_us={"median": 1.0, "p20": 1.0, "p80": 1.0}) if one.cell["batch"] == 8 else one
        for one in tails
    ]
    points = FIGURES["latency"].numbers(without)["classes"]["10"]["graph-bare@cudnn"]
    assert [(one["batch"], one["host_us"]["p99"]) for one in points] == [(1, 9e9), (32, 9e9), (128, 9e9)]


REDRAWN = [FIGURES[name] for name in ("landscape", "random-heads")]


def test_the_numbers_of_the_gallery_are_drawn_where_the_records_are_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "COMMITTED", tmp_path)
    for kind in REDRAWN:
        figure, numbers = kind.make()
        assert numbers == drawn(kind.name) and numbers["title"] == figure.get_suptitle()


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
    missing = {kind.file for kind in SHOWN.values() if f"autotune/records/{kind.file}" not in names}
    assert missing == {kind.file for kind in REDRAWN}
    assert sum(len(zlib.compress((ROOT / path).read_bytes())) for path in files) < 1_000_000
