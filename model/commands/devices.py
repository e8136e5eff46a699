"""The device that the option ``--device`` names."""

import torch

from ..bad_input import BadInput
from .options import Device


def torch_device(wanted: Device) -> torch.device:
    """Return the device that an option names; "auto" is the current CUDA device where there is one, else the CPU.

    Raises:
        BadInput: "cuda" without a CUDA device.
    """
    if wanted is Device.cuda and not torch.cuda.is_available():
        raise BadInput("--device: got cuda, but torch sees no CUDA device here; wants auto or cpu")
    use_cuda = wanted is not Device.cpu and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
