"""The comparison with earlyon in model/README.md is that of the record, whose rows are whole."""

import json
from statistics import mean

import pytest
from support.documents import ROOT, Document

RECORD = json.loads((ROOT / "autotune" / "records" / "cpu" / "earlyon-digits.json").read_text())
WAYS = ("earlyon, two stages", "earlyon, jointly", "auxhead, linear heads", "auxhead, earlyon's heads")
HEADINGS = ("trained and calibrated by", "accuracy", "accuracy without exits", "leave early", "mean exit", "mean work")
SEEDS = 5


def over_seeds(way: str, field: str) -> float:
    return mean(row[field] for row in RECORD["rows"] if row["way"] == way)


def test_the_record_holds_every_way_with_every_seed_on_the_same_images() -> None:
    rows = RECORD["rows"]
    assert [(row["seed"], row["way"]) for row in rows] == [(seed, way) for seed in range(SEEDS) for way in WAYS]
    for row in rows:
        assert sum(row["shares"]) == pytest.approx(1.0)
        assert row["left_early"] == pytest.approx(1.0 - row["shares"][-1], abs=1e-6)
        assert row["mean_exit"] == pytest.approx(sum(i * share for i, share in enumerate(row["shares"])), abs=1e-6)
        work = sum(share * done for share, done in zip(row["shares"], RECORD["work"], strict=True))
        assert row["mean_work"] == pytest.approx(work, abs=1e-6)
        assert row["full_accuracy"] == row["accuracy_of_exits"][-1]


def test_the_table_is_that_of_the_record() -> None:
    rows = []
    for way in WAYS:
        accuracies = (f"{over_seeds(way, field):.2%}" for field in ("accuracy", "full_accuracy"))
        early, work = (f"{over_seeds(way, field):.1%}" for field in ("left_early", "mean_work"))
        cells = [way, *accuracies, early, f"{over_seeds(way, 'mean_exit'):.2f}", work]
        rows.append(f"| {' | '.join(cells)} |")
    page = Document("model/README.md")
    page.has_table(f"| {' | '.join(HEADINGS)} |\n", rows)
    page.says(f"{SEEDS} seeds, {RECORD['epochs']} epochs, {RECORD['images']['test']} images of the test split")
    lost = 100 * (over_seeds(WAYS[0], "full_accuracy") - over_seeds(WAYS[0], "accuracy"))
    page.says(f"{lost:.1f} points of that are lost by leaving")
