"""Devices of commands: of one process, or of those of torchrun, each with its own, alike in versions and arguments."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..basics.bad_input import BadInput
from ..basics.machine import package_version
from ..processes.process_group import is_launched, joined_processes
from .options import Device


def torch_device(wanted: Device, local_rank: int | None = None) -> torch.device:
    """Return the device that an option names; "auto" is the current CUDA device where there is one, else the CPU.

    Of several processes of this machine each gets its own, which becomes the current one. ``BadInput`` for "cuda"
    without enough CUDA devices.
    """
    if wanted == "cpu" or not torch.cuda.is_available():
        if wanted == "cuda":
            raise BadInput("--device: got cuda, but torch sees no CUDA device here; wants auto or cpu")
        return torch.device("cpu")
    if local_rank is not None:
        if local_rank >= (count := torch.cuda.device_count()):
            wants = "wants at most as many processes"
            raise BadInput(f"--device: got cuda:{local_rank}, but torch sees {count} CUDA devices here; {wants}")
        torch.cuda.set_device(local_rank)
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def process_group(
    device: Device, *, gradients: bool = False, check: Callable[[], object] = lambda: None
) -> Iterator[torch.device]:
    """Join the processes of torchrun, if it started this one, and leave them at the end; yields the own device.

    Args:
        device: as the command was told.
        gradients: whether devices exchange them, by NCCL where they are GPUs; else only what is on the CPU goes round.
        check: is called first, and what it raises ends all processes: a host may lack a file that others have.
    """
    if not is_launched():
        check()
        yield torch_device(device)
        return

    def own_device() -> torch.device:
        check()
        return torch_device(device, int(os.environ["LOCAL_RANK"]))

    facts = {
        **{f"version of {name}": str(package_version(name)) for name in ("auxhead", "torch")},
        "arguments": " ".join(sys.argv[1:]),
        "device": "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda",
    }
    backend = "nccl" if gradients else "gloo"
    with joined_processes(lambda own: backend if own.type == "cuda" else "gloo", own_device, facts) as where:
        yield where
