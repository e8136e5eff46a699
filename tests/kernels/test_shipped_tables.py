"""tuned/: the shipped tables are of this kernel, and equal to the committed records' winners."""

import re
import statistics

import pytest
from auxhead.autotune.records import tables
from auxhead.autotune.records.comparison import Difference
from auxhead.autotune.sweep import search
from auxhead.autotune.sweep.kinds import kind_tables
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
SHIPPED = {"NVIDIA H200": ("h200/sweep.jsonl.gz", "h200/broad.jsonl.gz")}


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
        assert lookup(table.device, entry.shape, entry.place) == entry.config


def test_it_is_what_the_committed_records_decide(table, tmp_path, monkeypatch):
    read_once(monkeypatch, promotion)
    files = [COMMITTED / name for name in SHIPPED[table.device]]
    promoted = promotion.promote(files, tmp_path / "table.json").table
    decided = {(entry.shape, entry.place): entry for entry in promoted.entries}
    assert len(decided) == len(table.entries)
    for entry in table.entries:
        again = decided[entry.shape, entry.place]
        assert (again.config, again.serves) == (entry.config, entry.serves)
        assert again.margin == pytest.approx(entry.margin, abs=1e-3)


def test_the_rule_is_within_10_percent_of_it_in_the_median(table):
    """By all heads alone of which the rule's configuration of today was measured, kind by kind."""
    alone, known = sum(one.place == "alone" for one in table.entries), 0
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
    assert known == alone


def test_the_winners_are_published(monkeypatch):
    """All of them, and in the page of autotune/ what they come to."""
    read_once(monkeypatch, tables)
    monkeypatch.setattr(search, "tuned_devices", lambda: [table_path("NVIDIA H200").stem])  # and not what others have
    published = (COMMITTED / "h200/winners.md").read_text()
    printed = tune("table", COMMITTED / SHIPPED["NVIDIA H200"][0], "--markdown").output
    assert [line.split("|")[:6] for line in printed.splitlines()] == [
        line.split("|")[:6] for line in published.splitlines()
    ], "all but times, whose last digits depend on the processor"
    said = re.search(r"winner alone: of (\d+) heads (\d+) faster, (\d+) no difference .*, (\d+) slower\.", published)
    heads, faster, same, slower = said.groups()
    PAGE.says(f"Of {heads} heads, the winner in situ makes the whole network surely faster")
    rows = [line.split(" | ") for line in published.splitlines() if line.startswith("| layer")]
    assert len(rows) == int(heads)
    over_alone = [float(row[-1].split()[0]) for row in rows if row[-1][0].isdigit() and "no difference" not in row[-1]]
    assert (sum(one < 1 for one in over_alone), sum(one > 1 for one in over_alone)) == (int(faster), int(slower))
    slowest = f"slower in {slower}, by {100 * max(over_alone) - 100:.1f} %; in {same} nothing differs beyond noise:"
    PAGE.says(f"than the winner alone in {faster} and {slowest}")
    said = re.search(
        r"rule's configuration: of \d+ heads (\d+) faster, .*\((\d+) the same.*\), (\d+) slower", published
    )
    faster, kept, slower = said.groups()
    PAGE.says(f"which {kept} of them keep, {faster} make the network surely faster and {slower} slower.")
    alone = [float(row[5].split()[0]) if row[5][0].isdigit() else 1.0 for row in rows]
    over_rule = f"{statistics.median(alone):.2f} of the time of the rule that it was tuned beside"
    PAGE.says(f"a tuned head takes {over_rule} (median; {min(alone):.2f} at best)")
    compared, differing, share = re.search(
        r"A/A: of ([\d,]+) configurations (\d+) \((.*)%\) look diff", published
    ).groups()
    assert int(compared.replace(",", "")) >= 1000 and float(share) <= 1.0
    PAGE.says(f"of {compared} configurations {differing} ({share} %) look different from themselves")


def test_how_far_tunings_agree_is_that_of_the_record():
    counted = {"alone": [0, 0, 0], "network": [0, 0, 0]}
    others = []
    for record in records("h200/retune.jsonl"):
        tied = [pair["tunings"] for pair in record.paired[1:] if _tied(pair)]
        if record.protocol["place"] == "alone":
            others += [pair["median_ratio"] for pair in record.paired[1:] if not _tied(pair)]
        of_place = counted[record.protocol["place"]]
        for index, number in enumerate((record.protocol["tunings"], record.paired[0]["tunings"], sum(tied))):
            of_place[index] += number
    tunings, same, tied = counted["network"]
    assert (same + tied) / tunings >= 0.95
    said = (
        f"Tuned ten times afresh, {tunings // 10} heads of 1,000 classes came in situ (batches of 1 to 16) to the same"
    )
    PAGE.says(f"{said} configuration in {same} of {tunings} tunings and to one tied with it in {tied};")
    assert counted["alone"][0] == tunings
    tunings, same, tied = counted["alone"]
    PAGE.says(f"alone (batches of 1 to 128) in {same} and {tied},")
    said = f"{100 - 100 * min(others):.0f} % less to {100 * max(others) - 100:.0f} % more than what most did"
    PAGE.says(f"what the other {tunings - same - tied} chose takes {said}")


def _tied(pair):
    return "median_ratio" in pair and Difference(*(pair[name] for name in Difference._fields)).is_tie
