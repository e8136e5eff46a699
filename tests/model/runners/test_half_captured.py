"""A capture that ends at any line or call of CUDA's runtime leaves no stream capturing, and frees each graph once."""

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from enum import IntEnum
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from auxhead.kernels.cuda import runtime as cuda_runtime
from auxhead.kernels.cuda.lifetimes import MemoryPool
from auxhead.model.runners import capture, captures
from auxhead.model.runners.capture import Capture, nest_in_conditions
from auxhead.model.runners.captures import Captures
from support import stream_order
from support.interrupts import interrupted_at, lines_of
from torch import nn

DEVICE = torch.device("cuda", 0)
FILES = ("model/runners/capture.py", "kernels/cuda/lifetimes.py")


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorIllegalState = 401


class FakeRuntime:
    """CUDA's runtime: what captures, and the graphs there are; the call numbered ``failing``, from 0, fails."""

    cudaError_t = Status
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed=2)
    cudaGraphNodeType = SimpleNamespace(cudaGraphNodeTypeConditional=13)
    cudaGraphConditionalNodeType = SimpleNamespace(cudaGraphCondTypeIf=0)

    def __init__(self, failing: int | None = None) -> None:
        self.capturing, self.graphs, self.executables = set[int](), set[int](), set[int]()
        self.destroyed_twice = False
        self.calls, self._failing, self._made = 0, failing, count(1)
        for name, call in {
            "cudaStreamBeginCapture": lambda stream, _mode: self.capturing.add(stream),
            "cudaGraphCreate": lambda _flags: self._new(self.graphs),
            "cudaGraphInstantiate": lambda graph, _flags: self._new(self.executables, of=graph),
            "cudaGraphAddChildGraphNode": lambda _graph, _needs, _count, child: self._new(set(), of=child),
            "cudaGraphConditionalHandleCreate": lambda *_: 7,
            "cudaGraphAddNode": lambda *_: object(),
        }.items():
            setattr(self, name, partial(self._answer, call))
        self.cudaGraphDestroy = partial(self._destroy, self.graphs)
        self.cudaGraphExecDestroy = partial(self._destroy, self.executables)

    def _answer(self, call: Callable[..., Any], *given: Any) -> tuple[Any, ...]:
        self.calls += 1
        failed = self.calls - 1 == self._failing
        return (Status.cudaErrorMemoryAllocation, None) if failed else (Status.cudaSuccess, call(*given))

    def _new(self, kind: set[int], of: int | None = None) -> int:
        assert of is None or of in self.graphs
        kind.add(made := next(self._made))
        return made

    def _destroy(self, kind: set[int], one: int) -> None:
        self.destroyed_twice |= one not in kind
        kind.discard(one)

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        """End a capture; it is over if this fails, too."""
        if stream not in self.capturing:
            return Status.cudaErrorIllegalState, None
        self.capturing.discard(stream)
        return self._answer(self._new, self.graphs)

    def cudaGetErrorString(self, _status: Status) -> tuple[Status, bytes]:
        return Status.cudaSuccess, b"out of memory"

    def cudaGetLastError(self) -> tuple[Status]:
        return (Status.cudaSuccess,)

    def cudaGraphNodeParams(self) -> SimpleNamespace:
        return SimpleNamespace(type=None, conditional=SimpleNamespace(phGraph_out=[object()]))


class FakeAllocator:
    """PyTorch's pools of device memory: how often each is held, and which are being allocated from."""

    def __init__(self) -> None:
        self.held: Counter[object] = Counter()
        self.allocating: list[object] = []

    def begin(self, _device: int, pool: object) -> None:
        self.held[pool] += 1
        assert pool not in self.allocating
        self.allocating.append(pool)

    def end(self, _device: int, pool: object) -> None:
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)

    def release(self, _device: int, pool: object) -> None:
        assert self.held[pool] > 0
        self.held[pool] -= 1


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    allocator = FakeAllocator()
    for name, value in (
        ("_cuda_beginAllocateCurrentThreadToPool", allocator.begin),
        ("_cuda_endAllocateToPool", allocator.end),
        ("_cuda_releasePool", allocator.release),
    ):
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    stream_order.patched(monkeypatch)
    return allocator


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRuntime]:
    def faked(failing: int | None = None) -> FakeRuntime:
        runtime = FakeRuntime(failing)
        for module in (capture, cuda_runtime):
            monkeypatch.setattr(module, "runtime", runtime)
        return runtime

    return faked


def capture_some() -> None:
    """Capture three graphs, and nest them."""
    capture = Capture(DEVICE, MemoryPool(DEVICE))
    with capture.capturing(stream_order.Stream(), nn.Identity()):
        capture.cut()
        capture.cut()
    nest_in_conditions(capture.graphs)


def test_a_call_of_the_runtime_that_fails(faked: Callable[..., FakeRuntime], allocator: FakeAllocator) -> None:
    runtime, stream = faked(), stream_order.order.current
    capture_some()
    for failing in range(runtime.calls):
        runtime = faked(failing)
        with pytest.raises(torch.OutOfMemoryError, match="^out of memory"):
            capture_some()
        assert not (runtime.capturing or runtime.graphs or runtime.executables or runtime.destroyed_twice), failing
        assert stream_order.order.current is stream
        assert gc.isenabled()
        assert not allocator.allocating
        assert not any(allocator.held.values())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_each_line(faked: Callable[..., FakeRuntime], allocator: FakeAllocator) -> None:
    faked()
    gc.freeze()  # what other tests have left need not be looked over for each line
    stream = stream_order.order.current
    for line in lines_of(capture_some, *FILES):
        runtime = faked()
        if not interrupted_at(line, capture_some, *FILES):
            continue  # in a __del__, out of which nothing comes
        gc.collect()  # some is in a cycle
        assert not any(allocator.held.values()), line
        assert not (runtime.capturing or runtime.executables or runtime.destroyed_twice), line
        assert not allocator.allocating, line
        assert stream_order.order.current is stream
        assert gc.isenabled()
        assert not torch._C._len_torch_dispatch_stack(), line  # a mode that stays on would see all that comes after
    runtime = faked()
    capture_some()
    assert not (runtime.capturing or runtime.graphs)


def test_streams_whose_workspaces_find_no_memory_are_there_for_the_next_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_free", {})
    monkeypatch.setattr(captures, "new_stream", lambda _device, _priority: stream_order.Stream())
    enough = [True, False, False, True]

    def allocate(_streams: object, _stream: object) -> None:
        if not enough.pop(0):
            raise torch.OutOfMemoryError

    monkeypatch.setattr(captures.CaptureStreams, "allocate_workspaces", allocate)
    streams = captures.take_streams(DEVICE, -1)
    streams.give_back()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            captures.take_streams(DEVICE, -1)
    assert captures.take_streams(DEVICE, -1) is streams


class Streams:
    """Streams of a runner, which say what was done with them."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def wait(self) -> None:
        self.done.append("wait for streams")

    def give_back(self) -> None:
        self.done.append("give back")


@pytest.fixture
def captured(faked: Callable[..., FakeRuntime], monkeypatch: pytest.MonkeyPatch) -> tuple[Captures, list[str]]:
    """What a runner has, and a list of what is done as it is freed."""
    done: list[str] = []
    monkeypatch.setattr(captures, "take_streams", lambda _device, _priority: Streams(done))
    monkeypatch.setattr(captures, "beside_captures", nullcontext)
    monkeypatch.setattr(captures, "_left_behind", [])
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    mine = Captures(DEVICE, -1)
    mine.batches[1] = object()  # type: ignore[assignment]
    monkeypatch.setattr(mine.done, "synchronize", lambda: done.append("wait for requests"))
    return mine, done


def test_nothing_is_freed_that_is_under_way(captured: tuple[Captures, list[str]], allocator: FakeAllocator) -> None:
    mine, done = captured
    before = mine.memory
    mine.free()
    assert sorted(done[:2]) == ["wait for requests", "wait for streams"] and done[2:] == ["give back"]
    assert not mine.batches
    del before
    assert not any(allocator.held.values())
    mine.free()
    assert done.count("give back") == 1, "two runners would have the streams"


@pytest.mark.parametrize("at", ["requests", "streams"])
def test_an_interrupted_wait_frees_nothing(
    captured: tuple[Captures, list[str]], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, done = captured

    def interrupted() -> None:
        raise KeyboardInterrupt

    memory = mine.memory
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*(mine.done, "synchronize") if at == "requests" else (mine.streams, "wait"), interrupted)
        mine.free_or_leave()
    assert mine.batches and mine.memory is memory and "give back" not in done
    assert captures._left_behind == [mine]
    Captures(DEVICE, -1)
    assert not mine.batches and "give back" in done and not captures._left_behind


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError()])
def test_an_error_of_the_wait_is_nobodys(
    captured: tuple[Captures, list[str]], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come out of whatever runs as a runner goes. On a lost device nothing is under way."""
    mine, done = captured

    def fails() -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(mine.done, "synchronize", fails)
        mine.free_or_leave()
    lost = isinstance(error, RuntimeError)
    assert captures._left_behind == [mine] * (not lost)
    assert lost == (not mine.batches and done == ["give back"])
    Captures(DEVICE, -1)
    assert done[-1] == "give back"
