"""Checks a wheel and a source distribution of auxhead: ``python tests/support/distributions.py DIRECTORY``."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "model", "autotune", "plots")
#: Files that the wheel has beside sources, as patterns below the repository's root.
DATA = (
    "*/py.typed",
    "*/__init__.pyi",
    "kernels/launch/tuned/*.json",
    "plots/gallery/landscape.json",
    "plots/gallery/random-heads.json",
    "autotune/records/cpu/*",
    "autotune/records/h100/*.jsonl",
    "autotune/records/h200/*.json",
    "autotune/records/h200/*.jsonl",
    "autotune/records/h200/*.md",
)
MOST_BYTES_OF_WHEEL = 1_500_000
#: Files at the top of the source distribution.
AT_THE_TOP = (
    "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md",
    "SECURITY.md", "constraints-oldest.txt", "constraints-tools.txt", "constraints.txt", "pyproject.toml",
)  # fmt: skip


def files_below(*folders):
    """Return the paths of all files in folders of the repository, relative to its root; no compiled ones."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if path.suffix not in (".pyc", ".pyo")}


def check_wheel(wheel):
    """Check that a wheel has every source and the data of ``DATA``, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        of_metadata = {name.partition(".dist-info/")[2] for name in archive.namelist()} - {""}
    wanted = {path for path in files_below(*PACKAGES) if path.endswith(".py") and "/studies/" not in path}
    for pattern in DATA:
        matching = {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
        matching = {path for path in matching if path.split("/")[0] in PACKAGES}
        assert matching, f"{pattern}: matches no file of {ROOT}"
        wanted |= matching
    assert_same(wheel, names, {f"auxhead/{path}" for path in wanted})
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"} <= of_metadata, of_metadata
    size = wheel.stat().st_size
    assert size < MOST_BYTES_OF_WHEEL, f"{wheel.name} has {size:,} bytes, wants fewer than {MOST_BYTES_OF_WHEEL:,}"


def check_source_distribution(archive):
    """Check that a source distribution has all that ``make demo`` and ``make test`` need."""
    with tarfile.open(archive) as opened:
        names = {member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()}
    made = {name for name in names if name in ("PKG-INFO", "setup.cfg") or name.startswith("auxhead.egg-info/")}
    assert_same(archive, names - made, files_below(*PACKAGES, "docs", "tests") | set(AT_THE_TOP))


def assert_same(archive, names, wanted):
    """Name the first files that are missing or too many."""
    missing, surplus = sorted(wanted - names), sorted(names - wanted)
    assert not missing, f"{archive.name} lacks {len(missing)} files: {', '.join(missing[:5])}"
    assert not surplus, f"{archive.name} has {len(surplus)} files too many: {', '.join(surplus[:5])}"


if __name__ == "__main__":
    (_wheel,), (_source,) = Path(sys.argv[1]).glob("*.whl"), Path(sys.argv[1]).glob("*.tar.gz")
    check_wheel(_wheel)
    check_source_distribution(_source)
    print(f"{_wheel.name} ({_wheel.stat().st_size:,} bytes) and {_source.name} hold what they should")
