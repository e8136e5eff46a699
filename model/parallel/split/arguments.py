"""Reads and checks the devices and the balance that :func:`parallelize` is given."""

from collections.abc import Sequence

import torch

from ...bad_input import BadInput


def devices_of(devices: Sequence[torch.device | str]) -> list[torch.device]:
    """Return the devices, those of CUDA with an index; raises what :func:`parallelize` does."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(f"devices: got {devices!r}, wants a list of one device or more")
    found = []
    for given in devices:
        try:
            device = torch.device(given)
        except (RuntimeError, TypeError):
            raise ValueError(f"devices: got {given!r}, wants 'cuda:0' and the like, or 'cpu'") from None
        if device.type not in ("cuda", "cpu"):
            raise ValueError(f"devices: got {device}, wants CUDA devices or the CPU")
        if device.type == "cuda":
            there = torch.cuda.device_count()
            index = device.index
            if index is None:
                index = torch.cuda.current_device() if there else 0
            if index >= there:
                raise BadInput(f"devices: got cuda:{index}, but torch sees {there} CUDA devices here")
            device = torch.device("cuda", index)
        found.append(torch.device("cpu") if device.type == "cpu" else device)
    if len({device.type for device in found}) > 1:
        raise ValueError(f"devices: got {', '.join(map(str, found))}, wants all of one kind")
    return found
