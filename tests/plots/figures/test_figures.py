"""Every figure drawn from the committed records equals the committed one, and its numbers are theirs."""

import gzip
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from auxhead.plots import records as plots_records
from auxhead.plots.figures import registry
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import COMMITTED
from support.command_line import plot
from support.committed_records import read_once, records

try:
    import tomllib
except ImportError:  # before Python 3.11
    tomllib = pytest.importorskip("tomli")

GALLERY = Path(__file__).parents[3] / "plots" / "gallery"
TRACE = GALLERY / "timeline.trace.json.gz"


@pytest.fixture(scope="module")
def again():
    """Every figure, as it is drawn from the committed records, and its numbers; by name."""
    known = {}
    with pytest.MonkeyPatch.context() as patch:
        read_once(patch, plots_records)
        return {name: kind.make(None, known) for name, kind in FIGURES.items()}


def test_processes_of_their_own_draw_figures_in_order(tmp_path):
    """Of two files of records, so that both processes have something to do; the sweep's would take seconds."""
    kinds = [FIGURES[name] for name in ("calibration", "profile")]
    saved = list(registry.save_all(kinds, None, tmp_path))
    assert [(one.name, one.left_out) for one in saved] == [("calibration", ""), ("profile", "")]
    for path in kinds[1].save(None, tmp_path / "here" / "profile"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def bench():
    return [one for one in records("h200/bench.jsonl") if one.kind == "bench"]


def sweep():
    return [one for one in records("h200/sweep.jsonl.gz") if (one.kind, one.error) == ("sweep", None)]


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


@pytest.mark.parametrize("name", FIGURES)
def test_the_gallery_is_drawn_from_the_committed_records(name, again):
    figure, numbers = again[name]
    assert same(json.loads(json.dumps(numbers, allow_nan=False)), drawn(name))
    figure.draw_without_rendering()
    assert numbers["title"].split()[0] in (GALLERY / f"{name}.svg").read_text()


def test_the_gallery_holds_three_files_of_each_figure():
    wanted = {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg", "json")}
    assert {path.name for path in GALLERY.iterdir()} == wanted | {"README.md", TRACE.name}


def test_the_trace_is_that_of_the_committed_records(tmp_path):
    done = plot("perfetto", COMMITTED / "h200/overlap.jsonl", "--out", tmp_path / TRACE.name)
    assert done.exit_code == 0, done.output
    again, trace = (json.loads(gzip.decompress(path.read_bytes())) for path in (tmp_path / TRACE.name, TRACE))
    assert same(again, trace) and f"({TRACE.name})" in (GALLERY / "README.md").read_text()


def test_the_gallery_lists_every_figure_there_is():
    readme = (GALLERY / "README.md").read_text()
    listed = re.findall(r"^\| \[([a-z-]+)\]\(\1\.png\).*`auxhead-plot \1`", readme, flags=re.MULTILINE)
    assert listed == [name for name in FIGURES if (GALLERY / f"{name}.png").exists()]
    assert re.findall(r"!\[\]\(([a-z-]+)\.png\)", readme) == listed


def benched(variant, batch, exits="never"):
    return [one for one in bench() if (one.variant, one.cell["batch"], one.exits) == (variant, batch, exits)]


def test_latencies_are_those_of_records():
    points = [
        (int(classes), variant, point)
        for classes, lines in drawn("latency")["classes"].items()
        for variant, its in lines.items()
        for point in its
    ]
    assert len(points) > 40
    for classes, variant, point in points:
        (found,) = [
            one
            for one in benched(variant, point["batch"])
            if one.cell["classes"] == classes
            and all(point[us].items() <= getattr(one, us).items() for us in ("host_us", "device_us"))
        ]
        if "bare" in point:
            assert any(point["bare"].items() <= pair.items() for pair in found.paired if pair["role"] == "bare")
    ratios = [
        point["bare"]["device_ratio"] for classes, name, point in points if (classes, name) == (10, "overlapped@cudnn")
    ]
    assert f"add {100 * min(ratios) - 100:.0f} to {100 * max(ratios) - 100:.0f} %" in drawn("latency")["title"]


def test_a_latency_without_its_tail_is_not_drawn():
    tails = [replace(one, host_us={**one.host_us, "p99": 9e9}) for one in bench() if one.error is None]
    without = [
        replace(one, host_us={"median": 1.0, "p20": 1.0, "p80": 1.0}) if one.cell["batch"] == 8 else one
        for one in tails
    ]
    shown = FIGURES["latency"].numbers(without)
    assert "from the median to the 99th percentile of requests; what is added" in shown["stamp"]
    points = shown["classes"]["10"]["graph-bare@cudnn"]
    assert [(one["batch"], one["host_us"]["p99"]) for one in points] == [(1, 9e9), (32, 9e9), (128, 9e9)]


def test_times_to_the_answer_are_those_of_records():
    batches = drawn("time-to-answer")["batches"]
    assert list(batches) == ["1", "8", "32", "128"]
    for batch, lines in batches.items():
        for variant, points in lines.items():
            for point in points:
                found = benched(variant, int(batch), point["exit"])
                assert any(point["host_us"].items() <= one.host_us.items() for one in found), (batch, variant)
        assert [point["exit"] for point in lines["truncated@cudnn"]] == ["layer1", "layer2", "layer3", "layer4"]


@pytest.mark.parametrize("name", ["ranks", "landscape"])
def test_times_of_configurations_are_those_of_records(name):
    medians = {(one.variant, one.protocol["place"], one.device_us["median"]) for one in sweep()}
    heads = drawn(name)["heads"]
    for one in (one for head in heads for one in head["configs"]):
        assert (one["config"], "alone", one["alone_us"]) in medians
        assert (one["config"], "network", one.get("network_us")) in medians or name == "landscape"
    assert len({head["head"] for head in heads}) == len(heads)
    if name == "landscape":
        assert len(heads) == 8, "of two batch sizes of a network with four heads"
    else:
        in_network = [one.cell for one in sweep() if one.protocol["place"] == "network"]
        assert len(heads) == len({tuple(map(str, cell.values())) for cell in in_network})


def test_ranks_are_those_of_the_ratios_that_records_have():
    fields = ("model", "dtype", "tap", "classes")
    ratios = {  # of those that were measured again, the last
        (one.variant, one.cell["samples"], *(one.cell[name] for name in fields)): one.paired[0]["device_ratio"]
        for one in sweep()
        if one.protocol["place"] == "network"
    }
    for head in drawn("ranks")["heads"]:
        where = (head["batch"], *(head[name] for name in fields))
        by_network = sorted(head["configs"], key=lambda one: ratios[(one["config"], *where)])
        assert [one["rank_network"] for one in by_network] == list(range(1, len(by_network) + 1))
        assert [one["rank_alone"] for one in head["configs"]] == list(range(1, len(by_network) + 1))
    configs = sum(len(head["configs"]) for head in drawn("ranks")["heads"])
    assert sum(map(sum, drawn("ranks")["rank_counts"])) == configs <= len(ratios)


REDRAWN = [FIGURES[name] for name in ("ranks", "landscape")]


@pytest.mark.parametrize("kind", REDRAWN, ids=lambda kind: kind.name)
def test_the_numbers_of_the_gallery_are_drawn_where_the_records_are_not_there(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "COMMITTED", tmp_path)
    figure, drawn = kind.make()
    assert drawn == json.loads((GALLERY / f"{kind.name}.json").read_text())
    assert drawn["title"] in {text.get_text() for text in figure.findobj(lambda one: hasattr(one, "get_text"))}


def test_the_data_of_a_wheel_is_small_and_has_the_numbers_of_figures_without_records():
    data = tomllib.loads((GALLERY.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = {
        path.relative_to(GALLERY.parents[1])
        for package, patterns in data.items()
        if package != "*"
        for pattern in patterns
        for path in GALLERY.parents[1].joinpath(*package.split(".")[1:]).glob(pattern)
    }
    names = {path.as_posix() for path in files}
    assert {f"plots/gallery/{kind.name}.json" for kind in REDRAWN} <= names
    missing = {kind.file for kind in FIGURES.values() if f"autotune/records/{kind.file}" not in names}
    assert missing == {kind.file for kind in REDRAWN}
    assert sum(len(zlib.compress((GALLERY.parents[1] / path).read_bytes())) for path in files) < 1_000_000
