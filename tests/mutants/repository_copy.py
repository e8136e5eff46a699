"""A copy of the repository in which mutants are made, so that an interrupt leaves nothing behind."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "model", "autotune", "plots")


def copy_of_repository(to: Path) -> None:
    """Copy tracked and new files, and lay a folder ``build/auxhead`` with the four packages beside them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / "build" / "auxhead").mkdir(parents=True)
    for package in PACKAGES:
        (to / "build" / "auxhead" / package).symlink_to(to / package)
