"""The distributions: built as for a release, they hold what they should, and the wheel works without the repository."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.distributions import AT_THE_TOP, PACKAGES, ROOT, check_source_distribution, check_wheel

BUILD = "from setuptools import build_meta; build_meta.build_{}({!r})"


def build(what, tree, out):
    """Build a distribution of the sources in ``tree`` with the setuptools that is installed: no network."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(what, str(out))], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A source distribution, and the wheel made of that, as `python -m build` makes them."""
    pytest.importorskip("setuptools", minversion="77")
    made = tmp_path_factory.mktemp("distributions")
    tree, dist = made / "tree", made / "dist"
    dist.mkdir()
    for folder in (*PACKAGES, "tests"):  # a copy: building writes beside the sources
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in AT_THE_TOP:
        shutil.copy(ROOT / name, tree)
    build("sdist", tree, dist)
    (source,) = dist.iterdir()
    with tarfile.open(source) as archive:
        archive.extractall(made / "unpacked", filter="data")
    (unpacked,) = (made / "unpacked").iterdir()
    build("wheel", unpacked, dist)
    (wheel,) = dist.glob("*.whl")
    return wheel, source


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory):
    """A folder with the wheel's packages, which come before those of the repository."""
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(distributions[0]) as archive:
        archive.extractall(site)

    def run(code):
        code = f"import sys; sys.path.insert(0, {str(site)!r}); {code}"
        done = subprocess.run([sys.executable, "-c", code], cwd=site, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return site, run


def test_the_wheel_holds_every_package_and_its_data_and_nothing_else(distributions):
    check_wheel(distributions[0])


def test_the_source_distribution_can_be_tested(distributions):
    check_source_distribution(distributions[1])


def test_the_metadata_says_what_pyproject_says(installed):
    (metadata,) = installed[0].glob("auxhead-*.dist-info/METADATA")
    said = metadata.read_text()
    assert said.startswith("Metadata-Version: 2.4\nName: auxhead\n")
    for line in ("License-Expression: MIT", "License-File: LICENSE", "Requires-Python: >=3.10", "# auxhead"):
        assert f"\n{line}\n" in said, line


def test_every_module_of_the_wheel_can_be_imported(installed):
    site, run = installed
    modules = {
        ".".join(path.relative_to(site).with_suffix("").parts).removesuffix(".__init__")
        for path in site.joinpath("auxhead").rglob("*.py")
    }
    found = run(f"import importlib\nfor name in {sorted(modules)}: print(importlib.import_module(name).__file__)")
    assert len(found) == len(modules) and all(line.startswith(str(site)) for line in found), found[0]


def test_a_figure_is_drawn_from_the_numbers_in_the_wheel(installed, tmp_path):
    _, run = installed  # of raw records, which are not there
    run(f"from auxhead.plots.__main__ import app; app(['ranks', '--out', {str(tmp_path / 'ranks')!r}])")
    assert {path.name for path in tmp_path.iterdir()} == {"ranks.json", "ranks.png", "ranks.svg"}
    assert (tmp_path / "ranks.json").read_text() == (ROOT / "plots" / "gallery" / "ranks.json").read_text()


def test_the_citation_is_of_this_version():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.+)$", citation, re.MULTILINE) == [version]
    assert re.findall(r"^license: (.+)$", citation, re.MULTILINE) == ["MIT"]
    assert Path(ROOT / "CHANGELOG.md").read_text().splitlines()[2].startswith(f"## {version}")
