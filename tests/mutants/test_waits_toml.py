"""waits.toml fits the code: a mutant whose place has changed would only be missed when mutants are made."""

import ast
import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python has it since 3.11")
ROOT = Path(__file__).resolve().parents[2]
MUTANTS = tomllib.loads((Path(__file__).parent / "waits.toml").read_text())["mutant"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant["name"] for mutant in MUTANTS])
def test_a_mutant_can_be_made_and_has_tests(mutant):
    source = (ROOT / mutant["file"]).read_text()
    assert source.count(mutant["old"]) == mutant.get("places", 1)
    assert mutant["on"] in ("simulation", "gpu")
    for file, line in mutant.get("late", ()):
        assert len(re.findall(rf"^ *{re.escape(line)}", (ROOT / file).read_text(), re.MULTILINE)) == 1
    for word in mutant.get("tests", ()):
        if word.endswith(".py"):
            assert (ROOT / word).exists()
        elif word != "-k":
            ast.parse(word, mode="eval")  # "and" and "or" between parts of names
    assert ("tests" in mutant) != ("equivalent" in mutant)


def test_names_are_different():
    assert len({mutant["name"] for mutant in MUTANTS}) == len(MUTANTS)
