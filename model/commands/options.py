"""Options that several commands have: the device, and the directory for results."""

import os
from enum import Enum
from pathlib import Path

import torch

from ..bad_input import BadInput


class Device(str, Enum):
    """Devices to run on, by name."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def torch_device(wanted: Device) -> torch.device:
    """Return the device that an option names; "auto" is the current CUDA device where there is one, else the CPU.

    Raises:
        BadInput: "cuda" without a CUDA device.
    """
    if wanted is Device.cuda and not torch.cuda.is_available():
        raise BadInput("--device: got cuda, but torch sees no CUDA device here; wants auto or cpu")
    use_cuda = wanted is not Device.cpu and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


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
