"""Launches under ``max_prob`` are the machine code that committed records and tables were measured with."""

import json
from pathlib import Path

import pytest
from support.compiler_process import printed

triton = pytest.importorskip("triton")

#: Made by support/machine_code_digests.py at kernel ebb8260d3f761adb, before there were other criteria.
DIGESTS = json.loads((Path(__file__).parent / "machine_code.json").read_text())


@pytest.mark.skipif(triton.__version__ != "3.6.0", reason="another Triton compiles otherwise")
def test_it_is_what_was_measured(tmp_path):
    """If it is not, sweep again and promote; then commit what the script prints now."""
    assert printed("machine_code_digests.py", tmp_path) == DIGESTS
