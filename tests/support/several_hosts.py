"""Hosts pretended on this machine: an agent of torchrun and a current directory for each, which share no file."""

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.launched_ranks import LIMIT_S, Ended, is_stopped, run_main, write_to_files

#: How hosts find each other: options of torchrun, the same on all of them.
WAYS = {
    "static": ["--master-addr", "127.0.0.1", "--master-port", "{port}"],
    "c10d": ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", "127.0.0.1:{port}"],
}


def launch_hosts(
    folders: Sequence[Path],
    arguments: Sequence[object],
    *,
    way: str = "static",
    ranks: Sequence[int] = (1, 1),
    faults: Mapping[int, str] | None = None,
    main: str = "auxhead.model.__main__:app",
) -> list[Ended]:
    """Run a command on several hosts, by agents of torchrun that are forked, as their processes, from the server.

    Args:
        folders: the current directory of each host; ``<rank>.pid`` there tells of each process.
        arguments: of the command, the same for all.
        way: one of ``WAYS``.
        ranks: how many processes each host has.
        faults: by rank, a function of ``support.rank_faults`` that is called before.
        main: the module and the function of the command.

    Returns:
        Of each host the status of its agent, and what all of it has written. A host that is frozen, with its agent, is
        ended once the others are.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    agents = []
    for host, (folder, count) in enumerate(zip(folders, ranks, strict=True)):
        found = [one.format(port=port) for one in WAYS[way]] + (["--node-rank", str(host)] if way == "static" else [])
        given = ["--nnodes", str(len(folders)), *found, "--nproc-per-node", str(count)]
        agents.append(
            context.Process(target=_run_host, args=(folder, given, [str(one) for one in arguments], faults or {}, main))
        )
        agents[-1].start()
    until = time.monotonic() + 2 * LIMIT_S
    while any(agent.is_alive() and not is_stopped(agent.pid) for agent in agents) and time.monotonic() < until:
        time.sleep(0.02)
    for agent, folder in zip(agents, folders, strict=True):
        if agent.is_alive():
            agent.kill()
            for file in folder.glob("*.pid"):
                with suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
        agent.join()
    return [
        Ended(agent.exitcode or 0, *((folder / f"host.{name}").read_text() for name in ("out", "err")))
        for agent, folder in zip(agents, folders, strict=True)
    ]


def _run_host(folder: Path, options: list[str], arguments: list[str], faults: Mapping[int, str], main: str) -> None:
    """Be the agent of a host, as torchrun's own ``main`` makes one."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.chdir(folder)
    write_to_files("host")
    config, *_ = config_from_args(parse_args([*options, "script.py"]))
    config.start_method = "fork"  # a new interpreter takes seconds
    elastic_launch(config, _run_worker)(arguments, faults, main)


def _run_worker(arguments: list[str], faults: Mapping[int, str], main: str) -> None:
    """Be a process of torchrun, which by itself keeps for the agent what an entry point raises."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    rank = int(os.environ["RANK"])
    Path(f"{rank}.pid").write_text(str(os.getpid()))
    try:
        run_main(arguments, faults.get(rank), main)
    except SystemExit as left:
        if left.code:
            raise
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
