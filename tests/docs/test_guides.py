"""The guides: their length and order, commands that need no GPU, and numbers that stand in records."""

import re
import shlex
from pathlib import Path

import pytest
from auxhead.autotune.records.record import latest
from support.command_line import plot, tune
from support.committed_records import figure, records
from support.documents import ROOT, Document, name_of

FOLDER = ROOT / "model" / "guides"
GUIDES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
OVERLAP = Document("model/guides/overlap_plots.md")
#: By the words behind the path of a program: those of a guide that draw or print what is committed.
PROGRAMS = {"auxhead-plot": plot, "auxhead-tune": tune}


def test_the_list_of_guides_has_each_of_them():
    listed = re.findall(r"^\d\. .*?\]\((\w+\.md)\)", (FOLDER / "README.md").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == [path.name for path in GUIDES]


@pytest.mark.parametrize("guide", GUIDES, ids=name_of)
def test_a_guide_is_short_and_says_what_it_is_for(guide: Path):
    text = guide.read_text()
    assert 100 <= len(text.splitlines()) <= 200
    assert "**After it you" in text and "**You need**" in text and "ou should see" in text


def of_records() -> list[str]:
    """Commands that draw figures of committed records, or print tables of them."""
    lines = [
        line.strip() for guide in GUIDES for line in guide.read_text().splitlines() if line.startswith("    .venv/")
    ]
    return [line for line in lines if "auxhead-plot" in line or " table " in line]


@pytest.mark.parametrize("command", of_records())
def test_command_runs_without_a_gpu(command, tmp_path, monkeypatch):
    (tmp_path / "autotune").symlink_to(ROOT / "autotune")
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(command)
    result = PROGRAMS[Path(program).name](*words)
    assert result.exit_code == 0, result.output
    if "--out" in words:
        out = tmp_path / words[words.index("--out") + 1]
        assert list(out.parent.glob(f"{out.name}*")), result.output


def test_what_is_hidden_is_that_of_the_record():
    found = latest(one for one in records("h200/overlap.jsonl") if one.kind == "overlap")
    (record,) = (one for one in found if one.cell["batch"] == 32)
    alone = {pair["role"]: pair["device_us"]["median"] for pair in record.paired}
    coverage, hidden = (100 * record.measured[name]["median"] for name in ("coverage", "hiding_efficiency"))
    OVERLAP.says(f"At batch 32 coverage is still {coverage:.0f} %, but {hidden:.0f} % is hidden")
    assert 2 / 3 < (record.device_us["median"] - alone["trunk"]) / alone["heads"] < 3 / 4
    batches = {one.cell["batch"] for one in records("h200/overlap.jsonl")}
    OVERLAP.says("it has the batches of {}, {} and {}.".format(*sorted(batches)))


def test_what_the_timeline_shows_is_that_of_the_figure():
    drawn = figure("timeline")
    assert "8 heads (after blocks), batch 8" in drawn["network"] and len(drawn["heads"]) == 3
    assert [len(launch["taps"]) for launch in drawn["heads"]] == [2, 2, 2]
    OVERLAP.says("Two heads share a launch, so there are three for six heads.")
    OVERLAP.says(f"this one has {drawn['sm_count']}.")


def test_tiers_of_occupancy_are_those_of_the_record():
    found = {one.variant: one for one in latest(records("h200/footprint.jsonl")) if one.cell["batch"] == 32}
    said = []
    for variant in ("by rule", "4 SMs"):
        occupancy = found[variant].measured["occupancy"]
        (theoretical,), (estimate,) = occupancy["theoretical"], occupancy["estimate"]
        residency = 100 * occupancy["residency"]["warps_share"]["median"]
        said.append(f"{100 * theoretical['share']:.0f} %, {estimate['percent']:.0f} % and {residency:.2f} %")
    OVERLAP.says(f"by rule {said[0]}; confined to 4 SMs {said[1]}.")
    points = [one for batch in figure("footprint")["batches"].values() for one in batch["points"]]
    assert max(one["occupancy_percent"] for one in points) < 2.0
    assert max(points, key=lambda one: one["added_percent"])["footprint"] == "4 SMs"
