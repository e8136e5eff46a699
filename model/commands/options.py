"""Options that several commands have: the device, and the directory for results."""

from enum import Enum
from pathlib import Path

from ..bad_input import BadInput


class Device(str, Enum):
    """Devices to run on, by name."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def make_output_directory(out: Path) -> None:
    """Make the directory for results before the work begins.

    Raises:
        BadInput: a file is in its place.
    """
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out: {out} is a file, wants a directory")
    out.mkdir(parents=True, exist_ok=True)
