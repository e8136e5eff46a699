"""The command ``auxhead-tune zoo`` without a GPU: what it refuses, measures, skips and prints."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from auxhead.autotune.measuring.cells import DEFAULT
from auxhead.autotune.records.record import Record, append_record, read_records
from auxhead.autotune.zoo.networks import LIBRARIES, zoo_subject
from auxhead.autotune.zoo.tables import AGAIN, COMPILED, zoo_tables
from support.command_line import assert_one_line_error, tune
from support.pretended_gpu import ENVIRONMENT

pytestmark = pytest.mark.usefixtures("without_interpreter")
running = importlib.import_module("auxhead.autotune.zoo.run")


def record(model: str, batch: int, variant: str, device: float | None = None, **fields: Any) -> Record:
    cell = {
        "model": model, "dtype": "float16", "batch": batch, "classes": 1000, "placement": "own", "taps": ["a"],
        "input": [3, 224, 224],
    }  # fmt: skip
    times = None if device is None else {"median": device, "p20": device, "p80": device, "captures": [device]}
    host = None if device is None else {**times, "median": device + 40.0}
    return Record("zoo", cell, variant, "r", ENVIRONMENT, {"rounds": 20}, device_us=times, host_us=host, **fields)


def measured(model: str, batch: int, ours: float, compiled: float) -> list[Record]:
    notes = ["capture 1: Batch 1: overlapped (1 fork) on cudnn, measured 203.6 us to the answer: 48.1% less than it."]
    return [
        record(model, batch, DEFAULT, ours, notes=notes, measured={"first_answer_s": [28.4, 0.1], "joules": 0.02}),
        record(model, batch, COMPILED, compiled, measured={"first_answer_s": [9.5], "joules": 0.025}),
        *(record(model, batch, name, 200.0) for name in running.VARIANTS[2:]),
        record(model, batch, AGAIN, measured={"first_answer_s": [1.25]}),
    ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, pretended_gpu: Path) -> list[tuple[str, int]]:
    """Of each cell the first process records what it is to record; returns the cells that were measured."""
    cells: list[tuple[str, int]] = []

    def in_own_process(measure: Callable[..., None], model: str, batch: int, wanted: Any, where: Path, _: str) -> bool:
        if measure is running._measure:
            cells.append((model, batch))
            for one in measured(model, batch, 80.0, 100.0):
                append_record(where, one)
        return model != "swin_t"

    monkeypatch.setattr(running, "_in_own_process", in_own_process)
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
    for name in (*running.VARIANTS, AGAIN):
        append_record(path, Record("bench", record("resnet18", 1, name).cell, name, "r", ENVIRONMENT, {"rounds": 50}))
    assert tune("zoo", "resnet18", "--batch", "1").exit_code == 0 and gpu == [("resnet18", 1)]


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
    (table,) = zoo_tables([*measured("resnet18", 1, 80.0, 100.0), *measured("vit_b_16", 1, 105.0, 100.0)])
    assert table.rows[0] == (
        "resnet18", "1", "overlapped (1 fork) on cudnn", "80.0", "100.0", "200.0", "0.80", "0.40", "120.0", "140.0",
        "0.86", "28.4", "1.2", "9.5", "0.80", "1.00",
    )  # fmt: skip
    assert table.rows[1][6] == "1.05"
    assert table.remarks[-1].startswith(
        "At least as fast as torch.compile of the bare backbone on the device in 1 of 2"
    )


def test_what_failed_has_no_times_and_is_told() -> None:
    failed = [record("resnet18", 1, DEFAULT, error="no memory"), *measured("resnet18", 1, 80.0, 100.0)[1:]]
    (table,) = zoo_tables(failed)
    assert table.rows[0][2:7] == ("-", "-", "100.0", "200.0", "-")
    assert table.remarks == ["resnet18, batch 1, default@auto: no memory", "No network was timed beside torch.compile."]


@pytest.mark.parametrize("model", ["mobilenet_v3_large", "deit_tiny_patch16_224"])
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
