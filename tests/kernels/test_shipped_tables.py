"""tuned/: the shipped tables are of this kernel, and equal to the committed records' winners."""

import re
import statistics

import pytest
from auxhead.autotune.records import tables
from auxhead.autotune.records.comparison import Difference
from auxhead.autotune.sweep import search
from auxhead.autotune.sweep.winners import kind_tables
from auxhead.autotune.tuned import promote as promotion
from auxhead.kernels.launch.kernel_hash import is_measured_code
from auxhead.kernels.launch.tuned_table import read_table, table_path
from auxhead.plots.records import COMMITTED
from support.command_line import tune
from support.committed_records import read_once, records
from support.documents import Document
from support.example_tables import lookup

PAGE = Document("autotune/README.md")
#: The records that decide a device's table: of networks, and of the broad set.
SHIPPED = {
    "NVIDIA H200": ("h200/sweep.jsonl.gz", "h200/broad.jsonl.gz"),
    "NVIDIA H100 80GB HBM3": ("h100/broad.jsonl.gz",),
}


@pytest.fixture(params=SHIPPED, scope="module")
def table(request):
    return read_table(table_path(request.param))


def test_every_table_is_known_here():
    found = table_path("any").parent.glob("*.json")
    assert {path.name for path in found} == {table_path(name).name for name in SHIPPED}


def test_it_is_of_the_kernel_here(table):
    """Else every launch is chosen by rule: sweep again, and promote."""
    assert is_measured_code(table.kernel)


def test_its_entries_are_found_and_can_be_launched(table):
    assert table.entries
    for entry in table.entries:
        assert lookup(table.device, entry.shape) == entry.config


def test_it_is_what_the_committed_records_decide(table, tmp_path, monkeypatch):
    read_once(monkeypatch, promotion)
    files = [COMMITTED / name for name in SHIPPED[table.device]]
    promoted = promotion.promote(files, tmp_path / "table.json").table
    decided = {entry.shape: entry for entry in promoted.entries}
    assert len(decided) == len(table.entries)
    for entry in table.entries:
        again = decided[entry.shape]
        assert (again.config, again.serves) == (entry.config, entry.serves)
        assert again.margin == pytest.approx(entry.margin, abs=1e-3)


def test_the_rule_is_within_10_percent_of_it_in_the_median(table):
    """By all heads of which the rule's configuration of today was measured, kind by kind."""
    known = 0
    for name in SHIPPED[table.device]:
        tables_of = kind_tables(records(name))
        (found,) = [one for one in tables_of if one.title.endswith(f" of {table.device}")]
        *kinds, (every, number, median, *_) = found.rows
        assert every == "all" and int(number) == sum(int(row[1]) for row in kinds)
        assert 0.99 <= float(median) <= 1.1
        left_out = sum(int(re.search(r"\d+", remark)[0]) for remark in found.remarks)
        assert left_out < int(number), "the rule has others now, but more than half are known"
        known += int(number) + left_out
        PAGE.says(f"{float(median):.2f} times as long (median of {number} of {int(number) + left_out} heads")
    assert known == len(table.entries)


def test_the_winners_are_published(monkeypatch):
    """All of them, and in the page of autotune/ what they come to."""
    read_once(monkeypatch, tables)
    monkeypatch.setattr(search, "tuned_devices", lambda: [table_path("NVIDIA H200").stem])  # and not what others have
    published = (COMMITTED / "h200/winners.md").read_text()
    printed = tune("table", COMMITTED / SHIPPED["NVIDIA H200"][0], "--markdown").output
    assert [line.split("|")[:5] for line in printed.splitlines()] == [
        line.split("|")[:5] for line in published.splitlines()
    ], "all but times, whose last digits depend on the processor"
    rows = [line.split(" | ") for line in published.splitlines() if line.startswith("| batch")]
    over_rule = [float(row[-1].split()[0]) if row[-1][0].isdigit() else 1.0 for row in rows]
    kept = sum(row[3] == "tie" for row in rows)
    PAGE.says(f"Of {len(rows)} heads {kept} keep the configuration of the rule that they were tuned beside;")
    said = f"{statistics.median(over_rule):.2f} of its time (median; {min(over_rule):.2f} at best)"
    PAGE.says(f"all together they take {said}")
    compared, differing, share = re.search(
        r"A/A: of ([\d,]+) configurations (\d+) \((.*)%\) look diff", published
    ).groups()
    assert int(compared.replace(",", "")) >= 1000 and float(share) <= 1.0
    PAGE.says(f"of {compared} configurations {differing} ({share} %) look different from themselves")


def test_how_far_tunings_agree_is_that_of_the_record():
    alone = [one for one in records("h200/retune.jsonl") if one.protocol["place"] == "alone"]
    tunings = sum(one.protocol["tunings"] for one in alone)
    same = sum(one.paired[0]["tunings"] for one in alone)
    further = [pair for one in alone for pair in one.paired[1:]]
    tied = sum(pair["tunings"] for pair in further if _tied(pair))
    others = [pair["median_ratio"] for pair in further if not _tied(pair)]
    assert (same + tied) / tunings >= 0.9
    said = f"Tuned ten times afresh, {len(alone)} heads of 1,000 classes (batches of 1 to 128) came to the same"
    PAGE.says(f"{said} configuration in {same} of {tunings} tunings and to one tied with it in {tied};")
    said = f"{100 - 100 * min(others):.0f} % less to {100 * max(others) - 100:.0f} % more than what most did"
    PAGE.says(f"what the other {tunings - same - tied} chose takes {said}")


def _tied(pair):
    return "median_ratio" in pair and Difference(*(pair[name] for name in Difference._fields)).is_tie
