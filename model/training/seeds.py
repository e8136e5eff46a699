"""Seeds of random numbers: each epoch of each process has its own, so that a resumed training draws the same ones."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*parts: int) -> int:
    """Return a seed that differs wherever one of the parts (a seed, an epoch, a rank, each from 0) does."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """While open, seeding and drawing leave the random numbers outside as they are: Python's, NumPy's, PyTorch's."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_all(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and PyTorch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def generators_of(batches: object) -> list[torch.Generator]:
    """Return the generators of their own that some batches draw from: their ``generator`` and those of samplers."""
    found = (getattr(owner, "generator", None) for owner in _drawing(batches))
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def set_epoch(batches: object, epoch: int) -> None:
    """Tell samplers that draw an epoch's order by its number, DistributedSampler among them."""
    for owner in _drawing(batches):
        tell = getattr(owner, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def _drawing(batches: object) -> list[object]:
    batch_sampler = getattr(batches, "batch_sampler", None)
    owners = (batches, getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(owner): owner for owner in owners}.values())
