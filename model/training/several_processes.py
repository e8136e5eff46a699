"""Several processes that train one network together: DistributedDataParallel, means, and tensors of rank 0.

They are started by torchrun, and know each other by ``torch.distributed``; without a process group there is one.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..processes.process_group import ranks


def shared(module: nn.Module, device: torch.device) -> nn.Module:
    """Return what averages a module's gradients over all processes, or with one process the module."""
    if ranks() == 1:
        return module
    return DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)


def from_rank_0(tensors: list[Tensor]) -> None:
    """Overwrite tensors by those of rank 0, so that all processes go on alike."""
    if ranks() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


def averaged(tensor: Tensor) -> Tensor:
    """Return the mean of a tensor over all processes."""
    if ranks() == 1:
        return tensor
    dist.all_reduce(tensor)
    return tensor / ranks()
