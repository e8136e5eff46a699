"""The figure of the zoo: which runs it takes, what it says of what is missing, and what it refuses."""

import json

import pytest
from auxhead.autotune.records.zoo import COMPILED, DEFAULT, GRAPH, MAX_AUTOTUNE
from auxhead.plots.figures.zoo import zoo_figure, zoo_numbers
from auxhead.plots.records import NoRecords
from support.command_line import assert_one_line_error, plot
from support.written_records import written
from support.zoo_records import failed, zoo_record, zoo_records


def some():
    return [
        *zoo_records("slow", 1, 120.0, 100.0),
        *zoo_records("fast", 1, 90.0, 100.0, "old"),
        *zoo_records("fast", 1, 80.0, 100.0),
        zoo_record("fast", 1, MAX_AUTOTUNE, 95.0),
        *zoo_records("fast", 8, 70.0, 100.0),
        *failed(zoo_records("wrong", 1, 1.0, 100.0), DEFAULT, "answers differ"),
        *failed(zoo_records("uncompiled", 1, 1.0, 1.0), COMPILED, "no memory"),
    ]


def test_networks_are_sorted_and_what_is_missing_is_named():
    drawn = zoo_numbers(some())
    assert list(drawn["networks"]) == ["fast", "slow", "wrong", "uncompiled"] and drawn["batches"] == [1, 8]
    fast = drawn["networks"]["fast"]["1"]
    assert fast == {
        "ratio": 0.8, "low": pytest.approx(72 / 110), "high": pytest.approx(88 / 90), "us": 80.0,
        "others": {GRAPH: 2.0, MAX_AUTOTUNE: 0.95},
    }  # fmt: skip
    assert drawn["networks"]["wrong"] == {"1": {"ratio": None, "missing": "failed", "others": {GRAPH: 2.0}}}
    assert drawn["networks"]["uncompiled"] == {"1": {"ratio": None, "missing": "no torch.compile", "others": {}}}
    assert drawn["title"] == (
        "make_runner by default takes 0.80 of torch.compile's time in the median\n"
        "of 3 networks and batches, and is at least as fast in 2 of them"
    )
    assert drawn["subtitle"].endswith("make_runner computes 3 heads as well. H200, torch 2.11, Triton 3.6")
    assert "20 rounds in 2 fresh captures" in drawn["stamp"]
    assert (
        "Failed: make_runner of wrong at batch 1 (answers differ); torch.compile of uncompiled at batch 1 (no memory)."
    ) in drawn["stamp"]


def test_many_failures_are_counted():
    broken = [one for name in "abcdef" for one in failed(zoo_records(name, 1, 1.0, 1.0), DEFAULT, "no memory")]
    said = zoo_numbers([*some(), *broken])["stamp"]
    assert "make_runner of b at batch 1 (no memory); 4 more." in said


def test_panels_have_a_row_for_each_network_around_the_line():
    figure = zoo_figure(zoo_numbers(some()))
    first, second = (axes for axes in figure.axes if axes.patches)
    assert [one.get_text() for one in first.get_yticklabels()] == ["fast", "slow", "wrong", "uncompiled"]
    assert [bar.get_x() for bar in first.patches[1:]] == [1.0, 1.0] and len(second.patches) == 2
    assert [bar.get_width() for bar in first.patches[1:]] == pytest.approx([-0.2, 0.2])
    assert len({bar.get_facecolor() for bar in first.patches[1:]}) == 2
    said = [
        [text.get_text() for text in axes.texts if text.get_text() not in ("faster ", " slower")]
        for axes in (first, second)
    ]
    assert sorted(said[0]) == ["0.80", "1.20", "failed", "no torch.compile"]
    assert sorted(said[1]) == ["0.70", "not measured", "not measured", "not measured"]
    (legend,) = (axes.get_legend() for axes in figure.axes if axes.get_legend())
    assert [text.get_text() for text in legend.get_texts()] == [
        "make_runner, at least as fast", "make_runner, slower", "plain CUDA graph, no heads",
        "torch.compile max-autotune, no heads",
    ]  # fmt: skip
    figure.draw_without_rendering()


def test_one_network_is_a_figure(tmp_path):
    path = written(tmp_path / "zoo.jsonl", *zoo_records("alone", 8, 100.0, 100.0))
    done = plot("zoo", "--records", path, "--out", tmp_path / "zoo")
    assert done.exit_code == 0, done.output
    drawn = json.loads((tmp_path / "zoo.json").read_text())
    assert drawn["title"] == "make_runner by default takes 1.00 times torch.compile's time for alone at batch 8"
    assert MAX_AUTOTUNE not in drawn["networks"]["alone"]["8"]["others"]
    others = zoo_numbers([*zoo_records("a", 8, 100.0, 100.0), *zoo_records("b", 8, 50.0, 100.0)])
    assert "0.75 of torch.compile's time in the median\nof 2 networks at batch 8" in others["title"]


def test_without_torch_compile_there_is_no_figure(tmp_path):
    without = failed(zoo_records("alone", 1, 1.0, 1.0), COMPILED, "no memory")
    with pytest.raises(NoRecords, match="no network whose default runner was timed beside torch.compile"):
        zoo_numbers(without)
    refused = plot("zoo", "--records", written(tmp_path / "zoo.jsonl", *without), "--out", tmp_path / "zoo")
    assert_one_line_error(refused, "timed beside torch.compile; `auxhead-tune zoo` makes it")


def test_where_neither_records_nor_gallery_has_it_the_command_says_what_makes_it(tmp_path, monkeypatch):
    monkeypatch.setattr("auxhead.plots.figures.registry.COMMITTED", tmp_path)
    monkeypatch.setattr("auxhead.plots.figures.registry.GALLERY", tmp_path)
    assert_one_line_error(
        plot("zoo"), "h200/zoo.jsonl: no such file, wants records of kind zoo; `auxhead-tune zoo` makes"
    )
