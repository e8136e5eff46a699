"""Processes as torchrun starts them, forked from a server that has imported everything, with its store and signals."""

import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch.distributed as dist

#: Seconds within which all processes have to end, whatever fails.
LIMIT_S = 30.0


@dataclass
class Ended:
    """A process that has ended."""

    status: int
    """Negative where a signal ended it."""
    output: str
    errors: str


def start_server(preload: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the server that processes are forked from, once, under other variables of the environment."""
    before = dict(os.environ)
    os.environ.pop("TRITON_INTERPRET", None)  # heads answer as they do for users
    os.environ.update(environment)
    try:
        multiprocessing.set_forkserver_preload([*preload])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def launch(
    folders: Sequence[Path],
    arguments: Sequence[object],
    *,
    faults: Mapping[int, str] | None = None,
    variables: Mapping[int, Mapping[str, str]] | None = None,
    alone: bool = False,
    main: str = "auxhead.model.__main__:app",
    limit_s: float = LIMIT_S,
) -> list[Ended]:
    """Run a command in several processes, and end all when the first one fails, as torchrun does.

    Args:
        folders: the current directory of each process; as many as there are processes.
        arguments: of the command, the same for all.
        faults: by rank, a function of ``support.rank_faults`` that is called before.
        variables: by rank, variables of the environment beside those of torchrun.
        alone: without torchrun.
        main: the module and the function of the command.
        limit_s: seconds after which processes that have not ended are killed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes = []
    for rank, folder in enumerate(folders):
        environment = {"GLOO_SOCKET_IFNAME": "lo"}
        if not alone:
            environment |= {
                "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port), "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(folders)),
            }  # fmt: skip
        environment |= (variables or {}).get(rank, {})
        given = (environment, folder, [str(one) for one in arguments], (faults or {}).get(rank), rank, main)
        processes.append(context.Process(target=_run_rank, args=given))
        processes[-1].start()
    _wait(processes, limit_s)
    return [
        Ended(process.exitcode or 0, *((folder / f"{rank}.{name}").read_text() for name in ("out", "err")))
        for rank, (process, folder) in enumerate(zip(processes, folders, strict=True))
    ]


def command(
    folder: Path, arguments: Sequence[object], *, ranks: int | None = None, module: str = "auxhead.model"
) -> "subprocess.CompletedProcess[str]":
    """Run a command as a user does, in a process or, with ``ranks``, under torchrun itself; it may take its time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = ":".join(entry for entry in sys.path if entry)
    environment.pop("TRITON_INTERPRET", None)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    given = [sys.executable, *(torchrun if ranks else []), "-m", module, *arguments]
    return subprocess.run(
        [str(one) for one in given], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def run_script() -> None:
    """Run the script that is the first argument, as ``python`` would with the others: a ``main`` for ``launch``."""
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _wait(processes: Sequence[multiprocessing.process.BaseProcess], limit_s: float) -> None:
    until, told = time.monotonic() + limit_s, False
    while any(process.is_alive() for process in processes):
        if not told and any(process.exitcode for process in processes):
            told = True
            for process in processes:
                process.terminate()  # which passes over one that has ended meanwhile
        stopped = told and [process for process in processes if process.is_alive() and is_stopped(process.pid)]
        if time.monotonic() > until or (stopped and len(stopped) == sum(one.is_alive() for one in processes)):
            for process in processes:
                process.kill()
        time.sleep(0.02)


def is_stopped(pid: int) -> bool:
    """Return whether a process is frozen by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _run_rank(
    environment: Mapping[str, str], folder: Path, arguments: list[str], fault: str | None, rank: int, main: str
) -> None:
    """Run the command in this process, its output in files."""
    os.environ.update(environment)
    os.chdir(folder)
    write_to_files(str(rank))
    run_main(arguments, fault, main)


def write_to_files(name: str) -> None:
    """Let what this process and those that it forks write go to ``<name>.out`` and ``<name>.err``."""
    for ending, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{name}.{ending}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)


def run_main(arguments: Sequence[str], fault: str | None, main: str) -> None:
    """Run the command in this process, after a function of ``support.rank_faults``."""
    sys.argv = ["auxhead", *arguments]
    torch.set_num_threads(1)
    if fault is not None:
        getattr(importlib.import_module("support.rank_faults"), fault)()
    module, _, function = main.partition(":")
    getattr(importlib.import_module(module), function)()
