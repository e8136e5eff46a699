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


def torch_device(wanted: Device) -> torch.device:
    """Return the device that an option names; "auto" is the current CUDA device where there is one, else the CPU.

    Raises:
        BadInput: "cuda" without a CUDA device.
    """
    if wanted is Device.cuda and not torch.cuda.is_available():
        raise BadInput("--device: got cuda, but torch sees no CUDA device here; wants auto or cpu")
    use_cuda = wanted is not Device.cpu and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


@contextmanager
def process_group(
    device: Device, *, gradients: bool = False, check: Callable[[], object] = lambda: None
) -> Iterator[torch.device]:
    """Join the processes of torchrun, if it started this one, and leave them at the end; yields the own device.

    Args:
        device: as the command was told.
        gradients: whether devices exchange them, by NCCL where they are GPUs; else only what is on the CPU goes round.
        check: is called first, and what it raises ends all processes: a host may lack a file that others have.

    Raises:
        BadInput: a device that is not there, or processes of other versions or arguments.
    """
    if not is_launched():
        check()
        yield torch_device(device)
        return

    def own_device() -> torch.device:
        check()
        return _own_device(device)

    facts = {
        **{f"version of {name}": str(package_version(name)) for name in ("auxhead", "torch")},
        "arguments": " ".join(sys.argv[1:]),
        "device": "cuda" if _uses_cuda(device) else "cpu",
    }
    backend = "nccl" if gradients else "gloo"
    with joined_processes(lambda own: backend if own.type == "cuda" else "gloo", own_device, facts) as where:
        yield where


def _uses_cuda(device: Device) -> bool:
    return device is not Device.cpu and torch.cuda.is_available()


def _own_device(device: Device) -> torch.device:
    """Return the device for one of several processes of this machine, and make it the current one."""
    if _uses_cuda(device):
        index, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if index >= count:
            wants = "wants at most as many processes"
            raise BadInput(f"--device: got cuda:{index}, but torch sees {count} CUDA devices here; {wants}")
        torch.cuda.set_device(index)
    return torch_device(device)
