"""The distributions, which work without the repository, and pinned versions, the oldest those of pyproject.toml."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from support.distributions import AT_THE_TOP, PACKAGES, ROOT, check_source_distribution, check_wheel
from support.documents import snippets

BUILD = "from setuptools import build_meta; build_meta.build_{}({!r})"


def build(what, tree, out):
    """Build a distribution of the sources in ``tree`` with the setuptools that is installed: no network."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(what, str(out))], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def distributions(tmp_path):
    """A source distribution, and the wheel made of that, as `python -m build` makes them."""
    pytest.importorskip("setuptools", minversion="77")
    tree, dist = tmp_path / "tree", tmp_path / "dist"
    dist.mkdir()
    for folder in (*PACKAGES, "docs", "tests"):  # a copy: building writes beside the sources
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in AT_THE_TOP:
        shutil.copy(ROOT / name, tree)
    build("sdist", tree, dist)
    (source,) = dist.iterdir()
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    build("wheel", unpacked, dist)
    (wheel,) = dist.glob("*.whl")
    return wheel, source


def test_they_hold_every_package_and_its_data_and_the_wheel_works_without_the_repository(distributions, tmp_path):
    """Each module can be imported, a figure is drawn where there are no raw records, and the quick start runs."""
    wheel, source = distributions
    check_wheel(wheel)
    check_source_distribution(source)
    site, out = tmp_path / "site", tmp_path / "out"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (metadata,) = site.glob("auxhead-*.dist-info/METADATA")
    said = metadata.read_text()
    assert said.startswith("Metadata-Version: 2.4\nName: auxhead\n")
    for line in ("License-Expression: MIT", "License-File: LICENSE", "Requires-Python: >=3.10", "# auxhead"):
        assert f"\n{line}\n" in said, line
    names = [path.relative_to(site).with_suffix("").parts for path in site.joinpath("auxhead").rglob("*.py")]
    modules = sorted({".".join(parts).removesuffix(".__init__") for parts in names})
    code = (
        f"import importlib, sys\nsys.path.insert(0, {str(site)!r})\n"  # before the repository's
        f"for name in {modules}: print(importlib.import_module(name).__file__)\n"
        "from auxhead.plots.__main__ import app\n"
        f"app(['landscape', '--out', {str(out / 'landscape')!r}], standalone_mode=False)\n"
    )
    (quick_start,) = snippets(ROOT / "docs" / "index.md")
    code += quick_start.code.strip("\n")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=site, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line.startswith(str(site)) for line in done.stdout.splitlines()[: len(modules)]), done.stdout
    assert "The backbone runs as it is." in done.stdout or "us to the answer" in done.stdout
    assert {path.name for path in out.iterdir()} == {"landscape.json", "landscape.png", "landscape.svg"}
    assert (out / "landscape.json").read_text() == (ROOT / "plots" / "gallery" / "landscape.json").read_text()


def test_the_citation_is_of_this_version():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [version]
    assert re.findall(r"^license: (.+)$", citation, re.MULTILINE) == ["MIT"]
    assert Path(ROOT / "CHANGELOG.md").read_text().splitlines()[2].startswith(f"## {version}")


#: Not at its floor: setuptools alone, whose own comment says why.
BESIDE = {"setuptools"}


def pins(name: str) -> dict[str, Version]:
    """What a file pins, by name."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if re.match(r"\w", line)]
    return {(one := Requirement(line)).name: Version(next(iter(one.specifier)).version) for line in lines}


def floors() -> dict[str, Version]:
    """The oldest of each dependency, those of extras for users included, by name."""
    text = (ROOT / "pyproject.toml").read_text()
    dependencies = text[text.index("\ndependencies = [") : text.index("\ntest = [")]
    return {name: Version(oldest) for name, oldest in re.findall(r'"([a-z-]+)>=([\d.]+)', dependencies)}


def test_the_oldest_pinned_are_the_floors() -> None:
    oldest, least = pins("constraints-oldest.txt"), floors()
    assert len(least) == 12
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
