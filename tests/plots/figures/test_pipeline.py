"""Figures of pipelines over two GPUs, from made-up records: their numbers are those of the records."""

from dataclasses import replace

import pytest
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import NoRecords
from support.pipeline_records import pipeline_records


def test_throughput_by_micro_batches():
    figure, drawn = FIGURES["pipeline"].draw(pipeline_records())
    assert drawn["title"].startswith("Batch 512: pipelined 1.80 times the throughput of model-parallel,\n2.40 times")
    assert list(drawn["batches"]) == ["120", "512"]
    lines = drawn["batches"]["120"]["lines"]
    assert [(one["split_size"], one["median"]) for one in lines["tutorial, never"]] == [(20, 5000.0), (40, 4500.0)]
    assert lines["pipelined-exits, 50/50"][1] == {
        "split_size": 40, "median": 9600.0, "p20": 9550.0, "p80": 9650.0, "bound": 10000.0,
    }  # fmt: skip
    assert drawn["batches"]["512"]["levels"]["one-gpu"]["median"] == 5000.0
    panel = figure.axes[0]
    assert panel.get_title(loc="left") == "batch 120" and len(panel.lines) == 6 + 5 + 3, "lines, bounds, levels"


def test_throughput_needs_the_baseline():
    records = [one for one in pipeline_records() if one.variant != "model-parallel"]
    with pytest.raises(NoRecords, match="no record of pipelined-heads beside model-parallel at batch 512"):
        FIGURES["pipeline"].draw(records)


def test_timeline_of_both_gpus():
    figure, drawn = FIGURES["gpus"].draw(pipeline_records())
    assert drawn["title"] == (
        "One request: 2.0 ms model-parallel, GPUs compute 50 and 50 % of it;\n"
        "1.0 ms ours, GPUs compute 90 and 90 % of it"
    )
    ours = drawn["panels"]["ours, a head after each stage, micro-batches of 20"]
    assert ours["computes"] == [[[0.0, 0.9]], [[0.1, 1.0]]] and ours["exchanges"][1] == [[0.05, 0.1]]
    ticks = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert ticks == ["GPU 0, 50 %", "GPU 1, 50 %"]


def test_timelines_where_all_have_exits_compare_nothing():
    records = [replace(one, exits="50/50") if one.kind == "gpus" else one for one in pipeline_records()]
    with pytest.raises(NoRecords, match="no timelines of two of .* where nobody leaves"):
        FIGURES["gpus"].draw(records)
