"""The doctor's findings from traces that were recorded on a GPU, for every planted fault and every correct program."""

from pathlib import Path

import pytest
from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.load_trace import load_trace
from support.doctor_programs.all_programs import CORRECT, FAULTY, PROGRAMS

TRACES = Path(__file__).parent / "traces"
#: In the repository, all together.
MOST_BYTES = 2_000_000


def found_in(name: str) -> list[str]:
    file = TRACES / f"{name}.json.gz"
    assert file.exists(), f"no trace of {name}: record it with support.record_doctor_traces"
    return [finding.kind for finding in find_all(load_trace(file))]


@pytest.mark.parametrize("name", sorted(FAULTY))
def test_a_planted_fault_is_found(name: str) -> None:
    program, found = PROGRAMS[name], set(found_in(name))
    assert program.finds <= found <= program.finds | program.may_find


@pytest.mark.parametrize("name", sorted(CORRECT))
def test_nothing_is_found_in_a_correct_program(name: str) -> None:
    assert found_in(name) == []


def test_there_are_traces_of_the_programs_alone_and_they_are_small() -> None:
    files = sorted(TRACES.glob("*"))
    assert {file.name.removesuffix(".json.gz") for file in files} == set(PROGRAMS)
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
