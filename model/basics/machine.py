"""Facts about this machine: versions of packages, driver, CUDA and cuDNN, names of its processor and GPUs."""

import platform
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .bad_input import one_line

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


def versions() -> dict[str, Any]:
    """Return what decides how fast a network runs here, and what it answers in the last bit, by name; None if unknown.

    PyTorch is imported for what it alone knows; where that fails its version is that of the installed package.
    """
    found: dict[str, Any] = {"torch": package_version("torch"), "cudnn": None, "cuda": None}
    with suppress(Exception):  # what an installation lacks it says in many ways
        import torch

        found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return {
        "driver": driver_version(),
        "torch": found["torch"],
        **{name: package_version(name) for name in ("triton", "torchvision")},
        "cudnn": found["cudnn"],
        "cuda": found["cuda"],
        "python": platform.python_version(),
        "auxhead": package_version("auxhead"),
    }


def report() -> str:
    """Return for reports of bugs, a line each: versions, GPUs, processor, operating system; never raises for one."""
    found = versions()
    names = ("auxhead", "torch", "triton", "torchvision", "python", "driver", "cuda", "cudnn")
    lines = [(name, found[name] or "none found") for name in names]
    lines += [("gpu", said) for said in _gpus()]
    lines += [("processor", processor_name() or "unknown"), ("system", platform.platform())]
    return "\n".join(f"{name:<12} {said}" for name, said in lines)


def _gpus() -> Iterator[str]:
    """Say of each GPU that PyTorch sees what it is; or why there is none."""
    try:
        import torch

        count = torch.cuda.device_count()
        for index in range(count):
            gpu = torch.cuda.get_device_properties(index)
            memory = f"{gpu.total_memory / 2**30:.0f} GiB"
            yield f"{index}: {gpu.name}, {gpu.multi_processor_count} SMs, capability {gpu.major}.{gpu.minor}, {memory}"
        if not count:
            yield "none that torch sees"
    except Exception as error:  # of an import, or of a driver
        yield f"unknown: {type(error).__name__}: {one_line(error)}"
