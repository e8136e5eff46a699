"""Memory of devices: numbers of bytes as people write them, and how many this process may still have."""

import re
from collections.abc import Collection, Mapping

import torch

#: From so many bytes on PyTorch's allocator takes memory from a GPU for one tensor alone, in multiples of the second.
_LARGE, _MULTIPLE = 10 * 2**20, 2 * 2**20
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_by_key(name: str, given: object, keys: Collection[int | None], kind: str) -> dict[int, int]:
    """Return numbers of bytes by key; raises ``ValueError`` for other keys, which are of a ``kind``."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not given.keys() <= set(keys):
        raise ValueError(f"{name}: got {given!r}, wants bytes by {kind}, as in {{0: '10GiB'}}")
    return {key: bytes_in(name, value) for key, value in given.items()}


def bytes_in(name: str, given: object) -> int:
    """Return a number of bytes, as such or as text like "10GiB"; raises ``ValueError`` for anything else."""
    found = re.fullmatch(r"\s*(\d+|\d+\.\d+(?=\s*\w))\s*([KMG]I?B)?\s*", str(given).upper())
    if found is None or isinstance(given, bool):
        raise ValueError(f"{name}: got {given!r}, wants bytes, as an int or as in '10GiB'")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def allocated_bytes(nbytes: int) -> int:
    """Return the memory of a GPU that a tensor of so many bytes takes: a large one's is rounded up."""
    return -(-nbytes // _MULTIPLE) * _MULTIPLE if nbytes >= _LARGE else nbytes


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes this process could still allocate on a device; None on the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return max(0, min(free + held, allowed) - used)
