"""Stands for CUDA's runtime in tests of captures: counts streams that capture, and graphs, and fails when asked to."""

from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any


class Status(IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorIllegalState = 401


SUCCESS = Status.cudaSuccess


class FakeRuntime:
    """Calls that captures make; the one numbered ``failing``, from 0, fails."""

    cudaError_t = Status
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed=2)
    cudaGraphNodeType = SimpleNamespace(cudaGraphNodeTypeConditional=13)
    cudaGraphConditionalNodeType = SimpleNamespace(cudaGraphCondTypeIf=0)

    def __init__(self, failing: int | None = None) -> None:
        self.capturing: set[int] = set()
        self.graphs: set[int] = set()
        self.executables: set[int] = set()
        self.destroyed_twice: set[int] = set()
        self.calls = 0
        self._failing = failing
        self._made = 0

    def _answer(self, call: Callable[[], Any]) -> tuple[Any, ...]:
        self.calls += 1
        if self.calls - 1 == self._failing:
            return Status.cudaErrorMemoryAllocation, None
        return SUCCESS, call()

    def _new(self, kind: set[int]) -> int:
        self._made += 1
        kind.add(self._made)
        return self._made

    def cudaGetErrorString(self, _status: Status) -> tuple[Status, bytes]:
        return SUCCESS, b"out of memory"

    def cudaGetLastError(self) -> tuple[Status]:
        return (SUCCESS,)

    def cudaStreamBeginCapture(self, stream: int, _mode: int) -> tuple[Any, ...]:
        return self._answer(lambda: self.capturing.add(stream))

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        """End a capture; it is over if this fails, too."""
        was = stream in self.capturing
        self.capturing.discard(stream)
        return self._answer(lambda: self._new(self.graphs)) if was else (Status.cudaErrorIllegalState, None)

    def cudaGraphCreate(self, _flags: int) -> tuple[Any, ...]:
        return self._answer(lambda: self._new(self.graphs))

    def cudaGraphInstantiate(self, graph: int, _flags: int) -> tuple[Any, ...]:
        assert graph in self.graphs
        return self._answer(lambda: self._new(self.executables))

    def cudaGraphAddChildGraphNode(self, _graph: int, _needs: object, _count: int, child: int) -> tuple[Any, ...]:
        assert child in self.graphs
        return self._answer(object)

    def cudaGraphConditionalHandleCreate(self, _graph: int, _default: int, _flags: int) -> tuple[Any, ...]:
        return self._answer(lambda: 7)

    def cudaGraphNodeParams(self) -> SimpleNamespace:
        return SimpleNamespace(type=None, conditional=SimpleNamespace(phGraph_out=[object()]))

    def cudaGraphAddNode(self, *_: object) -> tuple[Any, ...]:
        return self._answer(object)

    def cudaGraphDestroy(self, graph: int) -> None:
        self._destroy(graph, self.graphs)

    def cudaGraphExecDestroy(self, executable: int) -> None:
        self._destroy(executable, self.executables)

    def _destroy(self, one: int, kind: set[int]) -> None:
        if one not in kind:
            self.destroyed_twice.add(one)
        kind.discard(one)


class FakeAllocator:
    """PyTorch's pools of device memory: how often each is held, and which are being allocated from."""

    def __init__(self) -> None:
        self.held: dict[object, int] = {}
        self.allocating: list[object] = []

    def begin(self, _device: int, pool: object) -> None:
        self.held[pool] = self.held.get(pool, 0) + 1
        assert pool not in self.allocating
        self.allocating.append(pool)

    def end(self, _device: int, pool: object) -> None:
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)

    def release(self, _device: int, pool: object) -> None:
        assert self.held[pool] > 0
        self.held[pool] -= 1
