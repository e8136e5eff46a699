"""early_start: options by which a launch begins while the one before it ends, on GPUs that can."""

from typing import Any

import torch
from torch import Tensor

#: Compute capability from which launches start early. GPUs can from 9.0 on (CUDA C++ Programming Guide, "Programmatic
#: Dependent Launch"); none does before what it gains is measured.
CAPABILITY = (1000, 0)


def early_start(x: Tensor) -> dict[str, Any]:
    """Return the options of a launch on the device of ``x`` whose kernel calls ``await_launch_before``.

    Its programs come to their multiprocessors, and count out what they are to read, while the launch before it ends.
    """
    if x.is_cuda and torch.version.cuda and torch.cuda.get_device_capability(x.device) >= CAPABILITY:
        return {"EARLY_START": True, "launch_pdl": True}
    return {"EARLY_START": False}
