"""Options that several commands have: the device, and the directory for results."""

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


def make_output_directory(out: Path) -> None:
    """Make the directory for results before the work begins.

    Raises:
        BadInput: a file is in its place.
    """
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out: {out} is a file, wants a directory")
    out.mkdir(parents=True, exist_ok=True)
