"""The files of pinned versions: the oldest are the floors of pyproject.toml, and CI tests on them and on the newest."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from support.documents import ROOT

#: Not at its floor: setuptools alone, whose own comment says why.
BESIDE = {"setuptools"}


def pins(name: str) -> dict[str, Version]:
    """What a file pins, by name."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if re.match(r"\w", line)]
    return {(one := Requirement(line)).name: Version(next(iter(one.specifier)).version) for line in lines}


def floors() -> dict[str, Version]:
    """The oldest of each dependency, those of the demo and of TensorBoard included, by name."""
    text = (ROOT / "pyproject.toml").read_text()
    dependencies = text[text.index("\ndependencies = [") : text.index("\ntest = [")]
    return {name: Version(oldest) for name, oldest in re.findall(r'"([a-z-]+)>=([\d.]+)', dependencies)}


def test_the_oldest_pinned_are_the_floors() -> None:
    oldest, least = pins("constraints-oldest.txt"), floors()
    assert len(least) == 11
    assert {name: version for name, version in oldest.items() if name not in BESIDE} == least


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-tools.txt"])
def test_what_is_installed_by_default_is_not_older(name: str) -> None:
    pinned, least = pins(name), floors()
    assert pinned and all(version >= least[package] for package, version in pinned.items() if package in least)


def test_ci_tests_the_oldest_and_the_newest() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.search(r"^ +constraints: constraints-oldest.txt$", workflow, re.M)
    assert re.search(r'^ +constraints: ""', workflow, re.M)
    assert "run: make test CONSTRAINTS=${{ matrix.constraints }}" in workflow
