"""streams.py: the streams that a network runs on are nobody else's, and an interrupt leaves locks as they are."""

import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count, cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from auxhead.kernels.cuda import runtime as cuda_runtime
from auxhead.kernels.cuda.runtime import may_be_destroyed
from auxhead.model.basics import streams
from auxhead.model.basics.streams import OwnedLock, stream_pair
from support.graph_runner_cases import clear_batches, network
from torch import nn

#: Streams of a priority that PyTorch has; then it hands out the first again.
POOL = 32


class Stream:
    """A stream of CUDA."""

    device = torch.device("cuda", 0)

    def __init__(self, handle: int, *_: object) -> None:
        self.cuda_stream, self.stream_id = handle, 35


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, Stream]:
    """All streams by handle, as PyTorch and CUDA make them."""
    made: dict[int, Stream] = {}
    pools = {priority: cycle(range(base, base + POOL)) for priority, base in ((0, 1000), (-1, 2000))}
    new = count(5000)

    def stream(handle: int, *_: object) -> Stream:
        return made.setdefault(handle, Stream(handle))

    monkeypatch.setattr(torch.cuda, "Stream", lambda _device=None, priority=0: stream(next(pools[priority])))
    monkeypatch.setattr(torch.cuda, "ExternalStream", stream)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    runtime = SimpleNamespace(
        cudaStreamNonBlocking=1, cudaStreamCreateWithPriority=lambda _flags, _priority: (0, next(new))
    )
    monkeypatch.setattr(cuda_runtime, "runtime", runtime)
    monkeypatch.setattr(cuda_runtime, "checked", lambda returned: returned[1])
    monkeypatch.setattr(cuda_runtime, "beside_captures", nullcontext)
    monkeypatch.setattr(cuda_runtime, "_kept", set(), raising=False)
    return made


def test_our_streams_are_none_that_others_may_get(made: dict[int, Stream]) -> None:
    """Of which they may capture a graph, while another thread answers."""
    pair = stream_pair.__wrapped__(Stream.device)
    others = [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(POOL)]
    assert len({stream.cuda_stream for stream in (*pair, *others)}) == 2 + 2 * POOL


def test_a_stream_that_is_kept_is_told_from_one_that_may_be_destroyed(made: dict[int, Stream]) -> None:
    theirs = Stream(4000)
    theirs.stream_id = theirs.cuda_stream
    default = Stream(0)
    default.stream_id = 0
    pair = stream_pair.__wrapped__(Stream.device)
    for stream in pair:
        stream.stream_id = stream.cuda_stream
    kept = [*pair, default, torch.cuda.Stream()]
    assert may_be_destroyed(theirs) and not any(map(may_be_destroyed, kept))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("priority", [0, -1])
def test_all_streams_of_pytorch_can_be_used_beside_a_capture(priority: int) -> None:
    """By other threads: what is launched on one that the capture has forked to would become part of it."""
    net = network()
    (x,) = clear_batches(net, [8])
    wanted, caller = net(x), torch.cuda.Stream()
    with torch.cuda.stream(caller):
        net(x)
    torch.cuda.synchronize()
    graph, found = torch.cuda.CUDAGraph(), []

    def look(_layer: nn.Module, _inputs: object, _output: object) -> None:
        for _ in range(2 * POOL):
            with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
                if torch.cuda.current_stream() != caller:
                    found.append(torch.cuda.is_current_stream_capturing())

    handle = net.backbone.fc.register_forward_hook(look)
    try:
        with torch.cuda.graph(graph, stream=caller):
            answer = net(x)
    finally:
        handle.remove()
    graph.replay()
    assert found and not any(found)
    assert torch.equal(answer.label, wanted.label) and torch.equal(answer.exit_index, wanted.exit_index)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_eager_pass_goes_on_while_any_stream_of_pytorch_is_captured() -> None:
    net = network()
    (x,) = clear_batches(net, [8])
    wanted, y = net(x), torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(net, x).result()  # libraries make handles for each thread
        for priority in (0, -1):
            for _ in range(POOL):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=priority)):
                    z = y + 1
                    found = other_thread.submit(net, x).result()
                graph.replay()
                torch.cuda.synchronize()
                assert z.eq(2).all() and torch.equal(found.label, wanted.label)
                assert torch.equal(found.exit_index, wanted.exit_index)


# ``OwnedLock`` under interrupts: they come while it waits, and right after it was taken

needs_a_timer = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer here")


class _Interrupt(Exception):
    pass


@pytest.fixture
def interrupt_after():
    """Raises in this thread, so many seconds later."""

    def interrupt(*_):
        raise _Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@needs_a_timer
def test_an_interrupt_leaves_the_lock_to_the_thread_that_holds_it(interrupt_after):
    lock = OwnedLock()
    with ThreadPoolExecutor(1) as other_thread:
        assert other_thread.submit(lock.acquire).result()
        with pytest.raises(_Interrupt):
            interrupt_after(0.05)
            with lock:
                pytest.fail("two threads have it")
        assert not lock.acquire(blocking=False)
        other_thread.submit(lock.release).result()
        with lock:
            assert not other_thread.submit(lock.acquire, False).result()
        assert other_thread.submit(lock.acquire, False).result()


@needs_a_timer
def test_no_interrupt_leaves_it_held(interrupt_after):
    lock = OwnedLock()
    with ThreadPoolExecutor(1) as other_thread:
        for turn in range(300):
            with pytest.raises(_Interrupt):
                interrupt_after(1e-5 * (1 + turn % 30))
                while True:
                    with lock:
                        pass
            if free := other_thread.submit(lock.acquire, False).result():
                other_thread.submit(lock.release).result()
            assert free


@pytest.mark.parametrize(("device", "handle", "switches"), [(0, 7, False), (0, 8, True), (1, 7, True)])
def test_a_stream_is_switched_to_unless_it_is_current(monkeypatch, device: int, handle: int, switches: bool) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device)
    monkeypatch.setattr(streams, "current_handle", lambda _device: handle)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    wanted: Any = Stream(7)
    assert (streams.on_stream(wanted) is wanted) == switches
