"""early_start: options by which a launch begins while the one before it ends, on GPUs that can."""

from typing import Any

import torch
from torch import Tensor

#: Compute capability from which launches can begin early (CUDA C++ Programming Guide, "Programmatic Dependent Launch").
CAPABILITY = (9, 0)


def can_start_early(device: torch.device) -> bool:
    """Return whether launches can begin early on a device."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= CAPABILITY


def early_start(x: Tensor, begins_early: bool) -> dict[str, Any]:
    """Return the options of a launch on the device of ``x`` whose kernel calls ``await_launch_before``.

    If it ``begins_early`` its programs come to their multiprocessors while the launch before it ends, and so do those
    of the next one, if that begins early, too. It pays among short launches that all do so, as in what a compiler
    makes, and costs behind long ones and those of cuDNN.
    """
    if begins_early and can_start_early(x.device):
        return {"EARLY_START": True, "launch_pdl": True}
    return {"EARLY_START": False}
