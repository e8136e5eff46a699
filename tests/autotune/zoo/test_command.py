"""The command ``auxhead-tune zoo`` without a GPU: what it refuses, measures, skips and prints."""

import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from auxhead.autotune.records.record import BadRecord, Record, append_record, read_records
from auxhead.autotune.records.zoo import AGAIN, COMPILED, DEFAULT
from auxhead.autotune.zoo.networks import LIBRARIES, zoo_subject
from auxhead.autotune.zoo.tables import front_page, zoo_tables
from support.command_line import assert_one_line_error, tune
from support.pretended_gpu import ENVIRONMENT
from support.zoo_records import failed, forking, noting, zoo_record, zoo_records

pytestmark = pytest.mark.usefixtures("without_interpreter")
running = importlib.import_module("auxhead.autotune.zoo.run")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, pretended_gpu: Path) -> list[tuple[str, int]]:
    """Of each cell the first process records what it is to record; returns the cells that were measured.

    A second process is only for the smallest batch.
    """
    cells: list[tuple[str, int]] = []

    def ran(measure: Callable[..., None], model: str, batch: int, wanted: Any, where: Path, caches: str) -> bool:
        if measure is running._measure:
            cells.append((model, batch))
            for one in zoo_records(model, batch, 80.0, 100.0):
                append_record(where, one)
        else:
            assert measure is running._answer_again and cells[-1] == (model, batch) != (model, 8)
        return model != "swin_t"

    monkeypatch.setattr(running, "_ran", ran)
    monkeypatch.setattr(running, "environment", lambda _device: ENVIRONMENT)
    return cells


def test_networks_and_batches_are_measured_once(gpu: list[tuple[str, int]]) -> None:
    asked = ("zoo", "resnet18", "vit_b_16", "--batch", "1", "--batch", "8")
    done = tune(*asked)
    assert done.exit_code == 0, done.output
    assert gpu == [("resnet18", 1), ("resnet18", 8), ("vit_b_16", 1), ("vit_b_16", 8)]
    assert "4 of 4: vit_b_16, batch 8" in done.stdout
    said = "in 4 of 4; 0.80 of its time in the median, 0.80 to 0.80."
    assert said in done.stdout and "Records: autotune-records/zoo-nvidia-h200-fake.jsonl" in done.stdout
    assert tune(*asked).exit_code == 0 and len(gpu) == 4
    assert tune("zoo", "resnet18").exit_code == 0 and gpu[4:] == [("resnet18", 32)]


def test_records_of_others_in_the_file_are_no_matter(gpu: list[tuple[str, int]], pretended_gpu: Path) -> None:
    path = pretended_gpu / "zoo-nvidia-h200-fake.jsonl"
    append_record(path, Record("footprint", {"tap": "a"}, "fused", "r", ENVIRONMENT, {}))
    append_record(path, Record("zoo", {"tap": "a"}, "fused", "r", {**ENVIRONMENT, "gpu": "other"}, {}))
    for name in (*running.VARIANTS, *running.EAGER_VARIANTS, AGAIN):
        cell = zoo_record("resnet18", 1, name).cell
        append_record(path, Record("bench", cell, name, "r", ENVIRONMENT, {"rounds": 50}))
    assert tune("zoo", "resnet18", "--batch", "1").exit_code == 0 and gpu == [("resnet18", 1)]


def test_each_cell_has_a_process_of_its_own(tmp_path: Path) -> None:
    """And what one has forked is not waited for."""
    assert running._ran(noting, tmp_path / "first", None)
    assert not running._ran(noting, tmp_path / "second", "failed, as it was told to")
    assert not running._ran(forking, tmp_path / "pid")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it is still there
    assert len({int((tmp_path / name).read_text()) for name in ("first", "second")} | {os.getpid()}) == 3


def test_a_network_that_could_not_be_measured_is_told_at_the_end(gpu: list[tuple[str, int]]) -> None:
    done = tune("zoo", "swin_t", "resnet18", "--batch", "1")
    assert_one_line_error(done, "1 of 2 could not be measured: swin_t, batch 1")
    assert gpu == [("swin_t", 1), ("resnet18", 1)]


def test_names_are_checked_before_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_one_line_error(tune("zoo", "resnet19"), "NETWORK: got resnet19, wants one of resnet18, resnet50, ")
    assert_one_line_error(tune("zoo", "resnet18"), "zoo: torch sees no CUDA device here, wants one")
    monkeypatch.setitem(sys.modules, "timm", None)
    assert_one_line_error(tune("zoo", "deit_tiny_patch16_224"), "timm's, which is not installed; pip install timm")


def test_a_row_says_how_the_runner_compares() -> None:
    (table,) = zoo_tables([*zoo_records("resnet18", 1, 80.0, 100.0), *zoo_records("vit_b_16", 1, 105.0, 100.0)])
    assert table.rows[0] == (
        "resnet18", "1", "overlapped (1 fork) on cudnn", "80.0", "100.0", "200.0", "0.80", "0.40", "120.0", "140.0",
        "0.86", "28.4", "1.2", "9.5", "0.80", "1.00",
    )  # fmt: skip
    assert table.rows[1][6] == "1.05"
    assert table.remarks[-1].startswith(
        "At least as fast as torch.compile of the bare backbone on the device in 1 of 2"
    )


def test_what_failed_has_no_times_and_is_told() -> None:
    (table,) = zoo_tables(failed(zoo_records("resnet18", 1, 80.0, 100.0), DEFAULT, "no memory"))
    assert table.rows[0][3:7] == ("-", "100.0", "200.0", "-")
    assert table.remarks == ["resnet18, batch 1, default@auto: no memory", "No network was timed beside torch.compile."]


def test_a_run_that_was_stopped_does_not_take_the_place_of_one_that_came_to_its_end() -> None:
    whole, later = zoo_records("resnet18", 1, 80.0, 100.0), zoo_records("resnet18", 1, 70.0, 100.0, "later")
    stopped = zoo_record("resnet18", 1, COMPILED, run="stopped", error="no memory")
    assert [table.rows[0][6] for table in zoo_tables([*whole, stopped])] == ["0.80"]
    (table,) = zoo_tables([*whole, *failed(later, DEFAULT, "wrong answer")])
    assert table.rows[0][3:7] == ("-", "100.0", "200.0", "-") and "default@auto: wrong answer" in table.remarks[0]


def test_the_table_of_the_front_page_has_networks_by_ratio_and_medians() -> None:
    broken = failed(zoo_records("swin_t", 1, 1.0, 1.0), DEFAULT, "no memory")
    alone = failed(zoo_records("vit_b_16", 8, 1100.0, 1.0), COMPILED, "no memory")
    timed = [*zoo_records("resnet50", 1, 90.0, 100.0), *zoo_records("resnet18", 1, 80.0, 100.0)]
    title, _, *rows, _, remark = front_page([*broken, *alone, *timed]).splitlines()
    assert title.startswith("**make_runner by default") and title.endswith("; H200, torch 2.11**")
    assert rows == [
        "| network | batch 1 | batch 8 | first answer at batch 1, s | next process at batch 1, s |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| resnet18 | 0.80, 80 us | - | 28.4 | 1.2 |",
        "| resnet50 | 0.90, 90 us | - | 28.4 | 1.2 |",
        "| swin_t | failed | - | - | - |",
        "| vit_b_16 | - | -, 1,100 us | - | - |",
        "| median | 0.85 | - | 28.4 | 1.2 |",
    ]
    assert remark.startswith("- At least as fast") and "in 2 of 2; 0.85 of its time in the median" in remark
    elsewhere = dataclasses.replace(timed[0], environment={**ENVIRONMENT, "gpu": "H100"})
    with pytest.raises(BadRecord, match="got records of 2 devices and versions, wants those of one"):
        front_page([*timed, elsewhere])
    with pytest.raises(BadRecord, match="got records of 0 devices"):
        front_page([])


@pytest.mark.parametrize("model", ["resnet18", "deit_tiny_patch16_224"])
def test_a_network_tells_one_picture_from_another(model: str) -> None:
    if LIBRARIES[model] == "timm":
        pytest.importorskip("timm")
    subject = zoo_subject(model, 2, torch.device("cpu"))
    assert subject.example.dtype == torch.float16 and len(subject.network.taps) == 3 and len(subject.inputs) == 8
    logits = [torch.cat(of_exit) for of_exit in zip(*map(subject.network.logits, subject.inputs[:2]), strict=True)]
    for of_exit in logits:
        assert of_exit.isfinite().all() and of_exit.float().std(dim=0).mean() > 0.5


def test_records_are_read_again(gpu: list[tuple[str, int]], pretended_gpu: Path) -> None:
    tune("zoo", "resnet18", "--batch", "1")
    path = pretended_gpu / "zoo-nvidia-h200-fake.jsonl"
    assert {one.kind for one in read_records(path)} == {"zoo"}
    shown = tune("table", path)
    assert shown.exit_code == 0 and "make_runner by default, three heads, no image leaves" in shown.stdout
