"""compile_pool.py: launches find what other processes compiled, and those end with the one that began them."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest
from auxhead.autotune.measuring import compile_pool

SCRIPT = """
import json, multiprocessing, os, signal, sys, time
from functools import partial
from pathlib import Path

import torch


def main():
    from auxhead.autotune.measuring.compile_pool import CompilePool, InputOf, compile_alone
    from auxhead.autotune.measuring.heads_alone import AloneHead
    from auxhead.autotune.measuring.compile_only import compile_only
    from auxhead.kernels import LaunchConfig
    from auxhead.kernels.launch.launch_rule import config_by_rule
    from auxhead.model import FusedAuxHead

    x = torch.empty(2, 8, 4, 4, dtype=torch.float16)
    one = AloneHead(FusedAuxHead(8, 5, dtype=torch.float16), x)
    alone, rule = InputOf.of(one), config_by_rule(one.shape)
    packed = LaunchConfig(8, 8, 1, 4, 16, 16, 1, 8, 1, 1, 4, weight_buffers=2, features="packed")
    jobs = [partial(compile_alone, alone, rule), partial(compile_alone, alone, packed)]
    made = lambda: len([*Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")])
    if len(sys.argv) > 1:  # nothing to compile
        jobs = []
    with CompilePool((9, 0)) as pool:
        pool.run(jobs)
        there = made()
        compile_only(90)
        for job in jobs:
            job()
        print(json.dumps([there, made(), [one.pid for one in multiprocessing.active_children()]]), flush=True)
        time.sleep(60)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what they begin in the background ignore it
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_launches_find_what_was_compiled_and_no_process_stays(sent, tmp_path):
    """A terminal's Ctrl-C goes to all processes, which are not to complain of it one by one."""
    pytest.importorskip("triton")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, script, *["idle"] * (sent == signal.SIGKILL)]
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as begun:
        line = begun.stdout.readline()
        assert line, begun.stderr.read()
        there, after, workers = json.loads(line)
        os.killpg(begun.pid, sent) if sent == signal.SIGINT else os.kill(begun.pid, sent)
        said, complaints = begun.communicate(timeout=60)
    assert workers
    if sent == signal.SIGINT:
        assert (there, after) == (3, 3), "each was compiled once, by another process; one packs features"
        assert (begun.returncode, said, complaints) == (0, "interrupted\n", "")
    until = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < until, "they go on"
        time.sleep(0.05)


def test_a_pool_whose_processes_were_killed_leaves_it_to_the_launches(monkeypatch):
    class Broken:
        def __init__(self, *_arguments, **_options):
            self.submitted = 0

        def submit(self, _job):
            self.submitted += 1
            raise BrokenExecutor

        def shutdown(self, **_options):
            pass

    monkeypatch.setattr(compile_pool, "ProcessPoolExecutor", Broken)
    with compile_pool.CompilePool((9, 0)) as pool:
        pool.run([int])
        assert pool._pool.submitted == 2


COMPILES_A_LIBRARYS_HEAD = """
import torch
from auxhead.autotune.measuring.compile_only import compile_only
from auxhead.autotune.measuring.compile_pool import InputOf, compile_alone
from auxhead.autotune.measuring.heads_alone import AloneHead
from auxhead.kernels.launch.library_rule import config_of_library
from auxhead.model import FusedAuxHead

head = FusedAuxHead(8, 5, hidden_features=6, norm=True, dtype=torch.float16)
one = AloneHead(head, torch.empty(2, 8, 4, 4, dtype=torch.float16))
torch.nn.functional.linear = torch.nn.functional.layer_norm = None
compiled = compile_only(90)
compile_alone(InputOf.of(one), config_of_library(one.shape, 5))
print(len(compiled))
"""


def test_what_a_library_would_do_is_not_done(tmp_path):
    """A LayerNorm and a linear layer of a million features took minutes on the CPU, and nothing of them is compiled."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COMPILES_A_LIBRARYS_HEAD], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "2\n", done.stderr
