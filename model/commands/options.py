"""Options that several commands have: the device, and the directory for results."""

import os
from enum import Enum
from pathlib import Path

from ..bad_input import BadInput

#: Said in the help of each option that names a function of the user's.
RUNS_YOUR_CODE = (
    "This runs your code: the module, of the current directory or installed, is imported and the function called."
)


class Device(str, Enum):
    """Devices to run on, by name."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def check_output_directory(out: Path) -> None:
    """Check, before the work begins, that a directory for results is there or can be made.

    Raises:
        BadInput: a file is in its place, or nothing can be written there.
    """
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise BadInput(f"--out: {there} is a file, wants a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"--out: {there} cannot be written to, wants a directory that can")


def make_output_directory(out: Path) -> None:
    """Make the directory for results; raises as :func:`check_output_directory`."""
    check_output_directory(out)
    out.mkdir(parents=True, exist_ok=True)
