"""Processes that work together: how many there are, and joining those that torchrun started, once they are alike."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from ..basics.bad_input import BadInput, one_line
from .rank_failures import RankFailed, Watch

#: Seconds within which all processes have to come.
COME_S = 30.0
#: Seconds within which they connect, once all have come.
_CONNECT_S = 15.0
#: Of parts of stores that processes have had before.
_parts = count()


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
    with launched_processes(COME_S) as processes:
        where = device()
        processes.meet(facts)
        with processes.group(backend(where)):
            yield where


class Processes:
    """Processes under a :class:`Watch`: their store, by which they compare facts before anything connects them."""

    def __init__(self, store: dist.Store, watch: Watch, rank: int, wanted: int, come_s: float, name: str) -> None:
        """Have ``wanted`` processes, that come within ``come_s`` seconds; errors begin with ``name``."""
        self.store, self.watch, self.rank, self.wanted = store, watch, rank, wanted
        self._come_s, self._name = come_s, name

    def meet(self, facts: Mapping[str, str]) -> None:
        """Compare facts, and the number of processes, as they come.

        Raises:
            BadInput: a process has others, or does not come in time.
        """
        self.store.set(f"facts/{self.rank}", json.dumps({"world size": str(self.wanted), **facts}))
        until = time.monotonic() + self._come_s
        come: list[Mapping[str, str]] = []
        for other in range(self.wanted):
            while not self.store.check([f"facts/{other}"]):
                self.watch.check()
                if time.monotonic() > until:
                    late = f"rank {other} of {self.wanted} has not come within {self._come_s:.0f} s"
                    raise BadInput(f"{self._name}: {late}")
                time.sleep(0.02)
            come.append(json.loads(self.store.get(f"facts/{other}")))
            difference = first_difference(come)
            if difference is not None:
                raise BadInput(f"{self._name}: {difference}")

    def wait_for(self, key: str) -> bytes:
        """Return a value of the store as soon as another process has set it; raises ``RankFailed`` if one fails."""
        while not self.store.check([key]):
            self.watch.check()
            time.sleep(0.02)
        return self.store.get(key)

    @contextmanager
    def group(self, backend: str) -> Iterator[None]:
        """Connect the processes by PyTorch's process group, to the end of the body.

        Raises:
            BadInput: they meet in the store, but cannot connect.
        """
        try:
            self._connect(backend)
            with self.watch.told_before():  # NCCL's ends where all processes end theirs
                yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _connect(self, backend: str) -> None:
        store = dist.PrefixStore("group", self.store)
        apart = (
            f"{self._name}: the processes have met, but cannot connect to each other; wants ports that are open, and "
            "where hosts have several networks the interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        )
        try:
            with self.watch.within(_CONNECT_S, apart):
                dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.wanted)
        except RuntimeError as error:
            cause = self.watch.cause_elsewhere(error)
            if cause is not None:
                raise RankFailed(cause) from error
            raise BadInput(f"{apart} ({one_line(error)})") from error


def unused_part(store: dist.Store, name: str) -> dist.Store:
    """Return a part of a store where nothing of an earlier use is found, nor of an earlier try of torchrun.

    All processes call it alike.
    """
    return dist.PrefixStore(f"{name} {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}.{next(_parts)}", store)


@contextmanager
def launched_processes(come_s: float) -> Iterator[Processes]:
    """Find the processes that torchrun started, under a :class:`Watch`; nothing connects them yet."""
    rank, wanted = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = unused_part(_shared_store(rank), "auxhead")
    with watched_processes(store, rank, wanted, come_s, "torchrun") as processes:
        yield processes


@contextmanager
def watched_processes(store: dist.Store, rank: int, wanted: int, come_s: float, name: str) -> Iterator[Processes]:
    """Let processes that share a store hear of each other's failures; see :meth:`Watch.failures`."""
    with Watch(store, rank, wanted) as watch, watch.failures():
        yield Processes(store, watch, rank, wanted, come_s, name)


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
