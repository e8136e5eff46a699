"""tuned/: the shipped tables are of this kernel, and equal to the committed records' winners."""

import re
import statistics

import pytest
from auxhead.autotune.records import tables
from auxhead.autotune.records.comparison import Difference
from auxhead.autotune.sweep import kinds
from auxhead.autotune.sweep.kinds import kind_tables
from auxhead.autotune.tuned import promote as promotion
from auxhead.kernels.launch.kernel_hash import is_measured_code
from auxhead.kernels.launch.tuned_table import lookup, read_table, table_path
from auxhead.plots.records import COMMITTED
from support.command_line import tune
from support.committed_records import read_once, records
from support.documents import Document

PAGE = Document("autotune/README.md")
SHIPPED = {"NVIDIA H200": "h200/sweep.jsonl.gz"}


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
    promoted = promotion.promote([COMMITTED / SHIPPED[table.device]], tmp_path / "table.json").table
    decided = {(entry.shape, entry.place): entry for entry in promoted.entries}
    assert len(decided) == len(table.entries)
    for entry in table.entries:
        again = decided[entry.shape, entry.place]
        assert (again.config, again.serves) == (entry.config, entry.serves)
        assert again.margin == pytest.approx(entry.margin, abs=1e-3)


def test_what_the_rule_loses_to_it_is_told_by_kind_of_head(table):
    alone = {one.shape: one.margin for one in table.entries if one.place == "alone"}
    tables_of = kind_tables(records(SHIPPED[table.device]))
    (found,) = [one for one in tables_of if one.title.endswith(f" of {table.device}")]
    *kinds, (every, number, median, *_) = found.rows
    assert every == "all" and int(number) == sum(int(row[1]) for row in kinds)
    left_out = sum(int(re.search(r"\d+", remark)[0]) for remark in found.remarks)  # the rule has others now
    assert int(number) + left_out == len(alone) and left_out < 0.25 * len(alone)
    assert float(median) == pytest.approx(statistics.median(1 / (1 - one) for one in alone.values()), abs=0.05)


def test_the_winners_are_published(monkeypatch):
    """All of them, and in the page of autotune/ what they come to."""
    read_once(monkeypatch, tables)
    monkeypatch.setattr(kinds, "tuned_devices", lambda: [table_path("NVIDIA H200").stem])  # and not what others have
    published = (COMMITTED / "h200/winners.md").read_text()
    printed = tune("table", COMMITTED / SHIPPED["NVIDIA H200"], "--markdown").output
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
    said = f"a tuned head takes {statistics.median(alone):.2f} of the rule's time (median; {min(alone):.2f} at best)"
    PAGE.says(said)
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
