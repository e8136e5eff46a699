"""Several processes that train one network together: ranks, DistributedDataParallel, and what only one of them does.

They are started by torchrun, and know each other by ``torch.distributed``; without a process group there is one.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def ranks() -> int:
    """Return how many processes train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if ranks() > 1 else 0


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
