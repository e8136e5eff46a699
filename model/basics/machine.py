"""Version of the machine's driver and name of its processor, which PyTorch does not tell."""

import re
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")
_PROCESSORS = Path("/proc/cpuinfo")


@cache
def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None if unknown."""
    if found := _find(r"(\d+\.\d+(?:\.\d+)?)", _DRIVER):
        return found
    output = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return output.splitlines()[0].strip() if output else None


@cache
def processor_name() -> str | None:
    """Return the name of the host's processor; None if unknown."""
    return _find(r"^model name\s*:\s*(.+)$", _PROCESSORS)


def _find(pattern: str, path: Path) -> str | None:
    """Return the first group of a pattern in a file; None where there is none."""
    try:
        found = re.search(pattern, path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def output_of(command: Sequence[str]) -> str | None:
    """Return what a command prints; None where it is missing, fails or takes too long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
