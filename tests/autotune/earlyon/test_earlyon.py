"""The comparison with earlyon: what each way is given and found to do, and the record and table of the repository."""

import json
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from auxhead.autotune.earlyon.measure import TAPS, WAYS, Task, measured, work_at_exits
from auxhead.autotune.earlyon.run import run_earlyon
from auxhead.autotune.earlyon.tables import comparison_table
from auxhead.model.bad_input import BadInput
from auxhead.model.training.data_sets import Split, Splits
from support.documents import Document

RECORD = json.loads((files("auxhead.autotune.records") / "cpu" / "earlyon-digits.json").read_text())


def test_the_record_holds_every_way_with_every_seed_on_the_same_images() -> None:
    rows = RECORD["rows"]
    seeds = max(row["seed"] for row in rows) + 1
    assert seeds >= 5
    assert [(row["seed"], row["way"]) for row in rows] == [(s, way) for s in range(seeds) for way in WAYS]
    for row in rows:
        assert sum(row["shares"]) == pytest.approx(1.0)
        assert row["left_early"] == pytest.approx(1.0 - row["shares"][-1], abs=1e-6)
        assert row["mean_exit"] == pytest.approx(sum(i * share for i, share in enumerate(row["shares"])), abs=1e-6)
        work = sum(share * done for share, done in zip(row["shares"], RECORD["work"], strict=True))
        assert row["mean_work"] == pytest.approx(work, abs=1e-6)
        assert row["full_accuracy"] == row["accuracy_of_exits"][-1]


def test_the_table_is_that_of_the_record() -> None:
    heading, _, *rows = comparison_table(RECORD)
    page = Document("model/README.md")
    page.has_table(heading + "\n", rows)
    seeds = len(RECORD["rows"]) // len(WAYS)
    page.says(f"{seeds} seeds, {RECORD['epochs']} epochs, {RECORD['images']['test']} images of the test split")
    staged = [row for row in RECORD["rows"] if row["way"] == "earlyon, two stages"]
    lost = 100 * sum(row["full_accuracy"] - row["accuracy"] for row in staged) / seeds
    page.says(f"{lost:.1f} points of that are lost by leaving")


def test_means_are_over_seeds() -> None:
    row = {"way": "a", "accuracy": 0.5, "full_accuracy": 0.75, "left_early": 0.1, "mean_exit": 1.0, "mean_work": 0.25}
    rows = [row, row | {"way": "b"}, row | {"accuracy": 0.7, "mean_exit": 2.0}]
    assert comparison_table({"rows": rows})[2:] == [
        "| a | 60.00% | 75.00% | 10.0% | 1.50 | 25.0% |",
        "| b | 50.00% | 75.00% | 10.0% | 1.00 | 25.0% |",
    ]


def split(count: int, first: int) -> Split:
    torch.manual_seed(first)
    indices = torch.arange(first, first + count)
    return Split(torch.randint(256, (count, 3, 16, 16), dtype=torch.uint8), indices % 2, indices)


def test_each_way_is_trained_calibrated_and_tested() -> None:
    pytest.importorskip("earlyon")
    task = Task(Splits(split(32, 0), split(8, 32), split(6, 40)), 2, seed=0, epochs=1, max_accuracy_drop=1.0)
    work = work_at_exits(task)
    assert work == sorted(work) and work[0] > 0.2 and work[-1] == 1.0
    rows = list(measured(task, work))
    assert [row["way"] for row in rows] == list(WAYS)
    for row in rows:
        assert len(row["shares"]) == len(row["accuracy_of_exits"]) == len(TAPS) + 1
        assert row["left_early"] == pytest.approx(1.0 - row["shares"][-1], abs=1e-6)
    assert rows[0]["left_early"] > 0.0  # the budget allows anything
    first, second = task.backbone(), task.wrapper().backbone
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def test_without_earlyon_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "earlyon", None)
    with pytest.raises(BadInput, match="pip install earlyon==0.3.0"):
        run_earlyon(seeds=1, epochs=1, max_accuracy_drop=0.01, out=tmp_path / "out.json")
    assert not list(tmp_path.iterdir())
