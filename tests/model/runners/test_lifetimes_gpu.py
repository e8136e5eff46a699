"""Processes that have runners on a GPU: what they fork ends as it wants to, and they end without a word."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from auxhead.kernels import fused_head
from auxhead.kernels.cuda.runtime import checked, runtime
from auxhead.kernels.launch.arrival_counters import arrival_counters
from support.example_models import needs_gpu

pytestmark = needs_gpu

MADE = """
import gc, multiprocessing, os, sys, threading, types, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
import torch
from auxhead.model import ExitMonitor, make_runner
from support.graph_runner_cases import images, network

class Owned: pass
owned = Owned()
owned.network, owned.x = network(), images(4)
exits = len(owned.network.taps) + 1
owned.network.monitor = ExitMonitor([1 / exits] * exits, 100)
owned.pinned = owned.x.cpu().pin_memory()
owned.runners = [make_runner(owned.network, owned.x, exits=exits) for exits in ("overlapped", "polled", "gated")]
owned.runners.append(make_runner(owned.network, images(2), batch_sizes=(1, 2)))
owned.garbage = [make_runner(owned.network, owned.x, exits="polled")]
owned.garbage.append(owned.garbage)
for threshold in (0.2, 0.3, 0.4):
    owned.network.set_rules(threshold)
    owned.network(owned.x)
    owned.network(owned.x, stop=True)
    [runner(x) for runner in owned.runners for x in (owned.x, owned.pinned)]
    with torch.cuda.stream(torch.cuda.Stream()):
        owned.network(owned.x)
"""
FORKS = """
def collect():
    del owned.garbage
    gc.collect()

def drop_all():
    vars(owned).clear()
    gc.collect()

def ask():
    for runner in owned.runners:
        for call in (lambda: runner(owned.pinned), lambda: runner(owned.x), runner.refresh):
            try:
                call()
            except RuntimeError as error:
                assert "forked" in str(error) and "spawn" in str(error), error
            else:
                os._exit(7)
        runner.close()

def in_with():
    with owned.runners[0]:
        sys.exit()

def hold():
    sys.modules["held"] = types.ModuleType("held")
    sys.modules["held"].owned = owned

WAYS = (collect, drop_all, ask, in_with, hold)
for way in WAYS:
    if not (child := os.fork()):
        way()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, way
    [runner(owned.x) for runner in owned.runners]
    process = multiprocessing.get_context("fork").Process(target=way)
    process.start()
    process.join()
    assert process.exitcode == 0, way
assert owned.runners[0](owned.x).label.equal(owned.network(owned.x).label)
"""
HELD = """
sys.modules["held"] = types.ModuleType("held")
sys.modules["held"].owned = owned
os.held, sys.modules_kept = owned, [*sys.modules.values()]
"""
DAEMON = """
asked = [threading.Event() for _ in owned.runners]

def ask(runner, event):
    while True:
        runner(owned.x).label.cpu()
        event.set()

for runner, event in zip(owned.runners, asked):
    threading.Thread(target=ask, args=(runner, event), daemon=True).start()
[event.wait() for event in asked]
"""


@pytest.mark.parametrize("then", [FORKS, HELD, DAEMON], ids=["forks", "holds runners", "leaves daemons"])
def test_a_process_ends_well(then: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    script = [sys.executable, "-c", MADE + then]
    for _ in range(5 if then is DAEMON else 1):
        done = subprocess.run(script, capture_output=True, text=True, timeout=300, env=environment)
        # A lock of Inductor's that outlives its module, as all do where a program holds every module, says so.
        errors = re.sub(
            r"Exception ignored in: <function BaseFileLock.__del__(.*\n)+?AttributeError.*\n", "", done.stderr
        )
        assert (done.returncode, done.stdout, errors) == (0, "", "")


def test_streams_that_come_and_go_leave_little_behind() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x, weight = torch.randn(4, 16, device=device), torch.randn(5, 16, device=device)
    wanted = fused_head(x, weight, pool="none")
    torch.cuda.synchronize()
    before, held = torch.cuda.memory_reserved(), len(arrival_counters(device)._foreign)
    streams = []
    for number in range(800):
        handle = checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
        with torch.cuda.stream(torch.cuda.ExternalStream(int(handle), device)):
            found = fused_head(x, weight, pool="none")
        streams.append(handle)
        if number % 8 == 7:
            torch.cuda.synchronize()
            while streams:
                checked(runtime.cudaStreamDestroy(streams.pop()))
    assert found.confidence.equal(wanted.confidence)
    del found
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # of what PyTorch keeps for each stream that had a tensor
    assert torch.cuda.memory_reserved() - before <= 32 << 20  # 129 MiB, were each kept
    assert len(arrival_counters(device)._foreign) <= held + 8
