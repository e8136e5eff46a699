"""Several processes that train one network together: DistributedDataParallel, means, and tensors of rank 0.

They are started by torchrun, and know each other by ``torch.distributed``; without a process group there is one.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..basics.bad_input import BadInput
from ..processes.process_group import own_rank, ranks


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


@contextmanager
def file_of_rank_0(path: Path) -> Iterator[Path]:
    """Yield a file of rank 0: its own one there, and in the other processes a copy, which is removed at the end.

    Without such a file there is no copy either.
    """
    if ranks() == 1:
        yield path
        return
    group = dist.new_group(backend="gloo")  # the file goes from host to host, whatever the devices are
    content = [path.read_bytes() if own_rank() == 0 and path.is_file() else None]
    dist.broadcast_object_list(content, 0, group)
    dist.destroy_process_group(group)
    if own_rank() == 0:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        if content[0] is not None:
            copy.write_bytes(content[0])
        try:
            yield copy
        except BadInput as error:
            raise BadInput(str(error).replace(str(copy), str(path))) from None


def averaged(tensor: Tensor) -> Tensor:
    """Return the mean of a tensor over all processes."""
    if ranks() == 1:
        return tensor
    dist.all_reduce(tensor)
    return tensor / ranks()
