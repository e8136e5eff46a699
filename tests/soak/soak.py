"""Soak run on one GPU: ``PYTHONPATH=tests python tests/soak/soak.py [--delays] [--replays N] [--minutes M]``.

In rounds, two threads each ask runners of a network of their own on a stream of their own; or one thread asks all
runners of one network on three streams in turn. Inputs, rules, batch sizes and runners change at random; runners are
made anew each round. Beside that memory is allocated, poisoned and freed, canaries are watched over, PyTorch's caches
and cuBLAS's workspaces are emptied. Every answer is compared with what eager mode has said before, on the device.

With ``--delays`` random delays of up to 200 us are put on callers' and runners' streams and into the graphs.

The run fails (1) with the first answer that is wrong, canary that has changed, error or hang, or if memory grows. It
ends with 2 if it cannot say anything: without a GPU, or if the time was over first. Nothing else may use the GPU.
"""

import argparse
import faulthandler
import gc
import math
import platform
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from random import Random
from typing import NamedTuple

import torch
from auxhead.kernels import runs_triton
from auxhead.model.basics.streams import stream_pair
from support.example_models import SmallNet
from support.soak_client import SIZES, WAYS, Client, every_stop_pays
from support.soak_delays import Delays
from support.soak_table import SoakNet, Table, soak_network, soak_table

#: Requests of a round, of all threads: runners live as long.
ROUND, ROUND_OF_DELAYS = 20_000, 2_000
#: Rounds: of four kinds; the first four warm up, and two times four are compared.
_KINDS, _LEAST_ROUNDS = 4, 12
#: By which memory may grow: what PyTorch's allocator has given out, and what the process has besides (the driver's).
_SLACK_ALLOCATED, _SLACK_OUTSIDE = 0, 8 << 20
_HANGS_S = 600  # compiling all kernels may take minutes
#: Sizes of the inputs; the largest two are split.
BATCHES = [*range(1, 9), 11, 17] * 4


class Memory(NamedTuple):
    """Memory of the device in bytes, all runners closed and all caches emptied."""

    allocated: int
    """Given out by PyTorch's allocator."""
    outside: int
    """In use, but not by that allocator."""


def measure_memory() -> Memory:
    """Empty what keeps memory, and read what is left."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return Memory(torch.cuda.memory_allocated(), total - free - torch.cuda.memory_reserved())


def growth(values: list[int]) -> int | None:
    """The least of the last four rounds less the most of the four after the warm-up; None if there were too few."""
    if len(values) < _LEAST_ROUNDS:
        return None
    return min(values[-_KINDS:]) - max(values[_KINDS : 2 * _KINDS])


class Soak:
    """The rounds of a run, and what came of them."""

    def __init__(self, clients: list[Client], device: torch.device, wanted: int, seconds: float) -> None:
        self.clients = clients
        self.alarms: list[str] = []
        self.memory: list[Memory] = []
        self._device, self._wanted = device, wanted
        self._deadline = time.monotonic() + seconds
        self._stopped = threading.Event()
        pair = stream_pair(device)
        self._own = [torch.cuda.Stream(device) for _ in clients]
        self._others = [[torch.cuda.Stream(device), pair.trunk] for _ in clients]
        self._callers = [torch.cuda.default_stream(device), torch.cuda.Stream(device), torch.cuda.Stream(device)]

    @property
    def replays(self) -> int:
        """Requests so far that were answered from graphs."""
        return sum(client.replays for client in self.clients)

    def goes_on(self) -> bool:
        """Whether nothing has gone wrong and time is left; asked each thousand requests, so that a hang shows."""
        faulthandler.dump_traceback_later(_HANGS_S, exit=True)
        return not self._stopped.is_set() and time.monotonic() < self._deadline

    def run(self, requests: int) -> None:
        """Go round after round, of so many requests each, until there were enough."""
        began, told = time.monotonic(), 0
        with ThreadPoolExecutor(len(self.clients)) as threads:
            while self.replays < self._wanted and not self.alarms and self.goes_on():
                left = math.ceil(1.02 * (self._wanted - self.replays))  # some are eager
                self._round(len(self.memory), min(requests, left), threads)
                if self.alarms:
                    break
                self.memory.append(measure_memory())
                if (tenth := 10 * self.replays // self._wanted) > told:
                    told, seconds, now = tenth, time.monotonic() - began, self.memory[-1]
                    print(
                        f"{10 * told:4} %  {self.replays:9,} replays in {seconds / 60:5.1f} min "
                        f"({self.replays / seconds:,.0f} a second), no alarm; allocated {now.allocated / 2**20:.3f} "
                        f"MiB, outside {now.outside / 2**20:.1f} MiB",
                        flush=True,
                    )
        faulthandler.cancel_dump_traceback_later()

    def _round(self, number: int, requests: int, threads: ThreadPoolExecutor) -> None:
        def in_thread(index: int) -> list[str]:
            try:
                with torch.cuda.device(self._device):
                    alarms = self.clients[index].round(
                        [self._own[index]],
                        self._others[index],
                        -(-requests // len(self.clients)),
                        alone=False,
                        goes_on=self.goes_on,
                    )
            except BaseException:
                self._stopped.set()
                raise
            if alarms:
                self._stopped.set()
            return alarms

        if number % 2 == 0:
            running = [threads.submit(in_thread, index) for index in range(len(self.clients))]
            for client, future in zip(self.clients, running, strict=True):
                try:
                    self.alarms += future.result()
                except Exception:
                    self.alarms.append(f"{client.name}: an error in a thread\n{traceback.format_exc()}")
        else:
            index = number // 2 % len(self.clients)
            client, others = self.clients[index], self._others[index]
            try:
                self.alarms += client.round(self._callers, others, requests, alone=True, goes_on=self.goes_on)
            except Exception:
                self.alarms.append(f"{client.name}: an error\n{traceback.format_exc()}")

    def judge_memory(self) -> list[str]:
        """Compare memory after the last rounds with that after the first; returns lines to print, adds to alarms."""
        lines = []
        for name, what, slack in (
            ("allocated", "given out by PyTorch's allocator", _SLACK_ALLOCATED),
            ("outside", "outside of that allocator, all processes on the GPU", _SLACK_OUTSIDE),
        ):
            values = [getattr(memory, name) for memory in self.memory]
            grown = growth(values)
            if grown is None:
                lines.append(f"Memory {what}: not judged, as there were only {len(values)} rounds.")
                continue
            lines.append(
                f"Memory {what}, runners closed and caches emptied: {values[_KINDS] / 2**20:.3f} MiB after the warm-up "
                f"of {_KINDS} rounds, {values[-1] / 2**20:.3f} MiB after {len(values)}; growth {grown:,} bytes, "
                f"{slack:,} allowed (least of the last {_KINDS} rounds less most of rounds {_KINDS + 1} to "
                f"{2 * _KINDS})."
            )
            if grown > slack:
                self.alarms.append(f"memory {what} grows: {values} bytes, round by round")
        return lines


@contextmanager
def repeatable() -> Iterator[None]:
    """Algorithms that give the same numbers again, and threads that take turns often."""
    interval = sys.getswitchinterval()
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        sys.setswitchinterval(1e-4)
        try:
            yield
        finally:
            sys.setswitchinterval(interval)


def make_tables(seed: int, delays: bool) -> list[Table]:
    """Ask eager mode, of a network for each thread."""
    trunks = ("as_is", "as_is" if delays else "cudnn")  # a trunk of another kind is none of the layers with delays
    return [
        soak_table(soak_network(backbone, seed), trunk, BATCHES)
        for backbone, trunk in zip((SoakNet, SmallNet), trunks, strict=True)
    ]


def run(replays: int, minutes: float, *, delays: bool, seed: int) -> int:
    """Run, print a summary, and return the exit code."""
    device = torch.device("cuda", torch.cuda.current_device())
    print(
        f"Soak run{' with delays' if delays else ''}: {replays:,} replays on {torch.cuda.get_device_name(device)}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, seed {seed}.\n"
        f"Runners: {', '.join(WAYS)} (1 in 200), captured for batches of {', '.join(map(str, SIZES))}. "
        "Kernels that were never compiled here take some minutes first.",
        flush=True,
    )
    every_stop_pays()
    began = time.monotonic()
    with repeatable(), ExitStack() as stack:
        tables = make_tables(seed, delays)
        for table in tables:
            print(
                f"{type(table.network.backbone).__name__}, trunk {table.trunk!r}: {len(table.inputs)} inputs under "
                f"{len(table.rules)} sets of rules; answers of each exit: {', '.join(map(str, table.shares()))}."
            )
        its = Delays(Random(seed)) if delays else None
        if its is not None:
            stack.enter_context(its.in_graphs([table.network for table in tables]))
        clients = [
            Client(type(table.network.backbone).__name__, table, device, seed + number, its)
            for number, table in enumerate(tables)
        ]
        soak = Soak(clients, device, replays, 60 * minutes)
        torch.cuda.synchronize()
        soak.run(min(ROUND_OF_DELAYS if delays else ROUND, -(-replays // _LEAST_ROUNDS)))
    complete = soak.replays >= replays and len(soak.memory) >= _LEAST_ROUNDS
    lines = [] if soak.alarms else soak.judge_memory()
    print("\n".join([*lines, *(f"ALARM {alarm}" for alarm in soak.alarms)]))
    print(
        f"{soak.replays:,} replays of {replays:,} ({sum(client.requests for client in clients):,} requests) in "
        f"{len(soak.memory)} whole rounds and {(time.monotonic() - began) / 60:.1f} min: "
        + ("ALARM, see above." if soak.alarms else "no alarm.")
    )
    if soak.alarms:
        return 1
    if not complete:
        print("INCOMPLETE: ended before all replays were made or memory could be judged, so that nothing is shown.")
        return 2
    return 0


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description="Soak run of all runners on one GPU.")
    parser.add_argument("--delays", action="store_true", help="random delays on the streams and in the graphs")
    parser.add_argument("--replays", type=int, help="default 1,000,000; with --delays 100,000")
    parser.add_argument("--minutes", type=float, default=60.0, help="give up after so many minutes (default 60)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.replays is not None and options.replays < 1000:
        parser.error(f"--replays: got {options.replays}, wants at least 1000")
    if not torch.cuda.is_available() or not runs_triton(torch.empty(1, device="cuda")):
        print("The soak run needs a CUDA device and Triton, and one of them is not there: NOTHING WAS CHECKED.")
        return 2
    replays = options.replays or (100_000 if options.delays else 1_000_000)
    return run(replays, options.minutes, delays=options.delays, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
