"""Tables of diagnoses: one an environment, a row for each in the order in which they were made."""

import dataclasses

from auxhead.autotune.doctor.tables import doctor_tables
from auxhead.plots.records import COMMITTED
from support.command_line import tune
from support.committed_records import records


def test_a_row_has_the_verdict_and_the_findings():
    [table] = doctor_tables(records("h200/doctor.jsonl"))
    assert table.title.startswith("Diagnoses on NVIDIA H200, torch ")
    rows = {row[0]: row[1:] for row in table.rows}
    assert len(rows) == 12 and all(len(row) == 5 for row in rows.values())
    for one in records("h200/doctor.jsonl"):
        findings, request, trunk, rest, both = rows[one.cell["target"]]
        assert findings == (", ".join(found["kind"] for found in one.measured["findings"]) or "none")
        assert (request, both) == tuple(f"{one.measured[name]:,.1f}" for name in ("achieved_us", "overlapped_us"))
        if one.measured["side_us"]:
            assert (trunk, rest) == tuple(f"{one.measured[name]:,.1f}" for name in ("trunk_us", "side_us"))
        else:
            assert (trunk, rest) == (f"{one.measured['trunk_us']:,.1f} together", "-")
    assert table.remarks == ["together: all that ran, of which nothing is told from the trunk"]


def test_diagnoses_of_one_target_are_all_there_and_other_devices_have_a_table_of_their_own():
    first, second, *_ = records("h200/doctor.jsonl")
    again = dataclasses.replace(first, run="later")
    elsewhere = dataclasses.replace(second, environment={**second.environment, "gpu": "NVIDIA H100"})
    tables = doctor_tables([first, elsewhere, again])
    assert [len(table.rows) for table in tables] == [2, 1] and "NVIDIA H100" in tables[1].title
    assert not tables[1].remarks


def test_the_table_command_prints_them():
    result = tune("table", str(COMMITTED / "h200/doctor.jsonl"))
    assert result.exit_code == 0, result.output
    assert "both at once" in result.output and "auxhead.model.guides.targets:one_launch" in result.output
    markdown = tune("table", "--markdown", str(COMMITTED / "h200/doctor.jsonl"))
    assert "| auxhead.model.guides.targets:one_launch | none | " in markdown.output
