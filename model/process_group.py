"""Processes that work together: how many there are, and joining those that torchrun started, once they are alike."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from .bad_input import BadInput
from .rank_failures import Watch

#: Seconds within which all processes have to come.
COME_S = 30.0


def ranks() -> int:
    """Return how many processes work together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """Return the number of this process, from 0."""
    return dist.get_rank() if ranks() > 1 else 0


def first_difference(facts: Sequence[Mapping[str, str]]) -> str | None:
    """Return in words the first fact in which a process differs from rank 0; None if all have the same."""
    for name, wanted in facts[0].items():
        for rank, own in enumerate(facts):
            if own.get(name) != wanted:
                return f"{name}: rank 0 has {wanted}, rank {rank} has {own.get(name)}; wants the same in all processes"
    return None


def is_launched() -> bool:
    """Return whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


@contextmanager
def joined_processes(
    backend: Callable[[torch.device], str], device: Callable[[], torch.device], facts: Mapping[str, str]
) -> Iterator[torch.device]:
    """Join the processes that torchrun started, and leave them at the end; yields the own device.

    While it is open, a failure or the death of one ends all with ``RankFailed``; see :class:`Watch`.

    Args:
        backend: of the process group, for a device.
        device: finds the own one; an error that it raises ends all processes.
        facts: by name, what has to be the same in all of them.

    Raises:
        BadInput: a process has other facts or does not come within 30 seconds.
    """
    rank, wanted = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _shared_store(rank)
    with Watch(store, rank, wanted) as watch:
        try:
            with watch.failures():
                where = device()
                _meet(store, rank, {"world size": str(wanted), **facts}, wanted)
                name = backend(where)
                dist.init_process_group(name, store=dist.PrefixStore("group", store), rank=rank, world_size=wanted)
                yield where
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _shared_store(rank: int) -> dist.Store:
    """Return the store that torchrun holds for its processes, or rank 0 where torchrun leaves it to that."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return dist.TCPStore(
            host, port, is_master=rank == 0 and not of_torchrun, timeout=timedelta(seconds=COME_S),
            wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        raise BadInput(
            f"torchrun: nobody answers at {host}:{port}, where the processes meet ({str(error).splitlines()[0]:.100})"
        ) from None


def _meet(store: dist.Store, rank: int, facts: Mapping[str, str], wanted: int) -> None:
    """Compare the facts of all processes, as they come."""
    store.set(f"facts/{rank}", json.dumps(facts))
    until = time.monotonic() + COME_S
    come: list[Mapping[str, str]] = []
    for other in range(wanted):
        while not store.check([f"facts/{other}"]):
            if time.monotonic() > until:
                raise BadInput(f"torchrun: rank {other} of {wanted} has not come within {COME_S:.0f} s")
            time.sleep(0.02)
        come.append(json.loads(store.get(f"facts/{other}")))
        difference = first_difference(come)
        if difference is not None:
            raise BadInput(f"torchrun: {difference}")
