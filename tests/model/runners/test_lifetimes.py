"""A process that has runners forks, or ends: nothing of CUDA's is destroyed in the child, or while Python ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from auxhead.kernels import runs_triton

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates CUDA, which is here")

#: Destructors that end a forked child at once, as PyTorch's end it by SIGABRT.
SIMULATED = """
import gc, os, sys, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
import numpy, torch
parent = os.getpid()
torch.cuda._is_in_bad_fork = lambda here=os.getpid, parent=parent: here() != parent
from auxhead.kernels.cuda.lifetimes import keep_in_children, new_event
from auxhead.kernels.cuda.lifetimes import MemoryPool
from auxhead.model import EarlyExitNetwork, make_runner
from auxhead.model.runners import capture
from support import stream_order
from support.example_models import SmallNet, plain_heads
from support.fake_runtime import FakeAllocator, FakeRuntime
from support.simulated_cuda import idle_kernels, simulated_cuda

def end_child(status, here=os.getpid, end=os._exit, parent=parent):
    if here() != parent:
        end(status)

class Handle:
    def __del__(self, end=end_child):
        end(3)

class Event(stream_order.Event):  # no weak reference tells of its end
    def __init__(self, **options):
        super().__init__(**options)
        self.handle = Handle()

class Memory(numpy.ndarray):
    def __del__(self, end=end_child):
        end(4)

class Runtime(FakeRuntime):
    def _destroy(self, *one, end=end_child):
        end(5)

def release(*_):
    end_child(6)

stream_order.Event = Event
synchronize = stream_order.Stream.synchronize
stream_order.Stream.synchronize = lambda stream: (end_child(7), synchronize(stream))
class Owned: pass
owned = Owned()
allocator = FakeAllocator()
simulated, idle = simulated_cuda(), idle_kernels()
simulated.__enter__(), idle.__enter__()
torch.cuda.Event, torch.cuda.graph_pool_handle = Event, object
torch._C._cuda_beginAllocateCurrentThreadToPool = allocator.begin
torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool = allocator.end, release
capture.runtime = runtime = Runtime()
runtime.cudaGraphInstantiate = lambda *_: (capture.runtime.cudaError_t.cudaSuccess, 1)
runtime.cudaError_t = type(runtime).cudaError_t
capture.checked = lambda returned: returned[1]
owned.pinned = torch.from_numpy(numpy.zeros(8).view(Memory))
keep_in_children(owned.pinned)
for _ in range(200):  # others come and go
    keep_in_children(torch.zeros(1))
owned.graph = capture.Graph(object(), MemoryPool(torch.device("cuda", 0)))
owned.event, owned.x = new_event(), torch.randn(2, 3, 8, 8)
owned.network = EarlyExitNetwork(SmallNet(), plain_heads(), 0.5).eval()
owned.network.set_rules(0.7)
owned.runner = make_runner(owned.network, owned.x, exits="gated")
owned.garbage = [make_runner(owned.network, owned.x, exits="overlapped")]
owned.garbage.append(owned.garbage)
"""
FORKS = (
    SIMULATED
    + """
def collect():
    del owned.garbage
    gc.collect()

def drop():
    vars(owned).clear()
    gc.collect()

def ask():
    try:
        owned.runner(owned.x)
    except RuntimeError as error:
        assert "forked" in str(error) and "spawn" in str(error), error
    else:
        os._exit(8)
    owned.runner.close()

def hold():
    sys.modules[__name__].held = owned

for ways in ((ask, drop), (collect, hold)):
    if not (child := os.fork()):
        [way() for way in ways]
        if os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, ways
    owned.runner(owned.x)
idle.__exit__(None, None, None), simulated.__exit__(None, None, None)
os.held, sys.modules_kept = owned, [*sys.modules.values()]  # of a module that goes after others, whose names are None
"""
)
DAEMON = """
import threading, torch
from auxhead.model import EarlyExitNetwork, make_runner
from support.example_models import SmallNet, plain_heads

x = torch.randn(64, 3, 32, 32)
runner = make_runner(EarlyExitNetwork(SmallNet(), plain_heads(), 0.5).eval(), x)
asked = threading.Event()

def ask(*, for_ever):
    while True:
        runner(x).label.sum().item()
        asked.set()
        if not for_ever:
            return threading.Event().wait()

for for_ever in (True, True, False):
    threading.Thread(target=ask, kwargs={"for_ever": for_ever}, daemon=True).start()
asked.wait()
"""


@pytest.mark.parametrize("script", [FORKS, DAEMON], ids=["forks", "leaves a daemon"])
def test_a_process_ends_well(script: str) -> None:
    if not runs_triton(torch.empty(1)):
        pytest.skip("needs Triton's interpreter")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment["TRITON_INTERPRET"] = "0" if script is DAEMON else "1"  # the interpreter is for one thread
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
