"""Figure "doctor": it draws the last diagnosis, and its title says what the GPU needs, or else how long it works."""

import dataclasses
import json

import pytest
from auxhead.autotune.records.record import append_record
from auxhead.plots.figures.registry import FIGURES
from support.command_line import plot
from support.committed_records import records


@pytest.mark.parametrize(
    "target, said",
    [
        ("one_launch", "734 us a request, of which the GPU needs 642 at least"),
        ("graphs", "750 us a request, of which the GPU works 708"),
    ],
)
def test_the_title_says_what_the_gpu_needs_if_it_can_be_told(target, said):
    found = [one for one in records("h200/doctor.jsonl") if one.cell["target"].endswith(f":{target}")]
    drawn = FIGURES["doctor"].numbers(found)
    assert drawn["title"].endswith(f":{target}:\n{said}")


def test_the_last_diagnosis_is_drawn_whatever_those_before_it_are_of(tmp_path):
    first, *_, last = records("h200/doctor.jsonl")
    elsewhere = dataclasses.replace(first, environment={**first.environment, "gpu": "NVIDIA H100", "torch": None})
    for one in (elsewhere, last):
        append_record(tmp_path / "doctor.jsonl", one)
    drawn = plot("doctor", "--records", tmp_path / "doctor.jsonl", "--out", tmp_path / "figure")
    assert drawn.exit_code == 0, drawn.output
    assert json.loads((tmp_path / "figure.json").read_text()) == FIGURES["doctor"].numbers([last])
