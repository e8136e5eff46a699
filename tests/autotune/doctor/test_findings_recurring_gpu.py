"""Findings of what is done again in each request, on a GPU: a program with each fault, and one without it."""

import pytest
from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.load_trace import load_trace
from support.doctor_programs.program import Program
from support.doctor_programs.recurring import PAIRS
from support.record_doctor_traces import profile_program

pytestmark = pytest.mark.gpu
#: A program's function that has the fault; of the others the trace knows the network's or none.
PLACES = {"synchronous-copy": "forward", "garbage-collection": "recurring.py:"}
#: What it costs a request at least, microseconds.
LEAST_US = {"synchronous-copy": 100.0, "garbage-collection": 100.0, "jitter": 1000.0, "dtype-casts": 50.0}


def found_in(program: Program, folder):
    file = folder / "trace.json"
    profile_program(program, file)
    return {one.kind: one for one in find_all(load_trace(file))}


@pytest.mark.parametrize("kind", PAIRS)
def test_the_fault_is_found_with_its_place_and_cost_and_not_without_it(kind, tmp_path):
    faulty, correct = PAIRS[kind]
    finding = found_in(faulty, tmp_path)[kind]
    assert finding.cost_us > LEAST_US.get(kind, 5.0)
    if kind in PLACES:
        assert finding.lines and PLACES[kind] in finding.lines[0]
    if kind == "tf32-off":
        assert "matrix products" in finding.what
    assert kind not in found_in(correct, tmp_path)
