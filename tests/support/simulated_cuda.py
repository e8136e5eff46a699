"""Fake CUDA streams and graphs for testing runners without a GPU.

A "graph" runs again on the CPU what ran during its capture, into the same memory; kernels run in Triton's interpreter.
Bodies of conditional nodes run whatever the condition is. So this shows what a runner answers, not what it saves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from auxhead.autotune.bench import lower_bound as segments
from auxhead.autotune.heads import alone as alone_head
from auxhead.model import streams
from auxhead.model.runners import capture, captures, checks, graph_runner
from auxhead.model.runners import compacting as compacting_runner
from auxhead.model.runners import gated as gated_runner
from auxhead.model.runners import polled as polled_runner
from auxhead.model.streams import StreamPair
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_CAPTURING = (capture, captures, checks, compacting_runner, graph_runner, gated_runner, segments)


class _Stream:
    cuda_stream, stream_id, device = 1, 3, torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _stream: object) -> None:
        pass

    def wait_event(self, _event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _CaptureStreams:
    def __init__(self) -> None:
        self.trunk, self.side = _Stream(), _Stream()

    def wait(self) -> None:
        pass

    def give_back(self) -> None:
        pass


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, _stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _end: object) -> float:
        return 1.0


def simulated_events(patch: pytest.MonkeyPatch) -> None:
    """Let timers run on the CPU until the test of ``patch`` ends: each device time is a millisecond."""
    patch.setattr(torch.cuda, "Event", _Event)
    patch.setattr(torch.cuda, "synchronize", lambda _device=None: None)


class _Graph:
    """Calls that a recorder noted, to be run again; it keeps all memory of that run."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def launch(self, _stream: object) -> None:
        with torch.no_grad():
            for call in self.calls:
                call()


class _Recorder(TorchDispatchMode):
    """Notes PyTorch's operators in a graph as they run; kernels are noted where they are interpreted."""

    def __init__(self, graph: _Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)

        def again() -> None:
            for output, new in zip(tree_leaves(outputs), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(output, torch.Tensor) and output.data_ptr() != new.data_ptr():
                    output.copy_(new)

        self.graph.calls.append(again)
        return outputs


@contextmanager
def simulated_cuda() -> Iterator[None]:
    """Let runners be made and called on CPU tensors."""
    from triton.runtime.interpreter import GridExecutor  # there is no Triton for some platforms

    recording: list[_Recorder] = []  # at most one

    def warm_up(forward: Callable[[], None], refill: Callable[[], None], *_: object) -> None:
        refill()
        forward()
        refill()

    interpret = GridExecutor.__call__

    def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            interpret(executor, *args, **kwargs)
        if recording:
            recording[0].graph.calls.append(lambda: interpret(executor, *args, **kwargs))

    class Capture:
        def __init__(self, *_: Any) -> None:
            self.graphs: list[_Graph] = []

        @contextmanager
        def capturing(self, *_: Any) -> Iterator[None]:
            recording.append(_Recorder(_Graph()))
            try:
                with recording[0]:
                    yield
                self.cut()
            finally:
                recording.clear()

        def cut(self) -> None:
            self.graphs.append(recording[0].graph)
            recording[0].graph = _Graph()

    def nest_in_conditions(graphs: list[_Graph]) -> tuple[_Graph, list[int]]:
        root = _Graph()
        root.calls = [call for graph in graphs for call in graph.calls]
        return root, [0] * (len(graphs) - 1)  # no handles: the kernels have no condition to set

    with pytest.MonkeyPatch.context() as patch:
        simulated = {
            "Capture": Capture,
            "take_streams": lambda _device, _priority: _CaptureStreams(),
            "MemoryPool": lambda _device: object(),
            "beside_captures": nullcontext,
            "is_capturing": lambda _device: False,
            "_check_allocator": lambda: None,
            "warm_up": warm_up,
            "nest_in_conditions": nest_in_conditions,
        }
        for module in _CAPTURING:
            for name, value in simulated.items():
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        patch.setattr(GridExecutor, "__call__", launch)
        patch.setattr(checks, "_check_cuda", lambda _x: None)
        patch.setattr(streams, "current_handle", lambda _device: _Stream.cuda_stream)
        for name, value in (
            ("device", lambda _device: nullcontext()),
            ("stream", lambda _stream: nullcontext()),
            ("set_stream", lambda _stream: None),
            ("current_stream", lambda *_: _Stream()),
            ("current_device", lambda: None),
            ("is_current_stream_capturing", lambda: False),
            ("Stream", _Stream),
            ("Event", _Event),
            ("_sleep", lambda _cycles: None),
        ):
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(polled_runner, "_LEAST_SEGMENT_US", 0.0)
        patch.setattr(compacting_runner, "_LEAST_STOP_US", 0.0)
        patch.setattr(gated_runner, "_LEAST_GATED_US", 0.0)
        yield


class _ChainGraph:
    """Launches that ran as they were captured, and do not run again."""

    def replay(self) -> None:
        pass


@contextmanager
def simulated_chains(patch: pytest.MonkeyPatch, length: int) -> Iterator[None]:
    """Simulate CUDA for chains of ``length`` launches in torch's graphs, too, until the test of ``patch`` ends."""

    @contextmanager
    def graph(_graph: object, stream: object) -> Iterator[None]:
        yield

    with simulated_cuda():
        patch.setattr(torch.cuda, "synchronize", lambda _device=None: None)
        patch.setattr(torch.cuda, "CUDAGraph", _ChainGraph)
        patch.setattr(torch.cuda, "graph", graph)
        patch.setattr(alone_head, "stream_pair", lambda _device: StreamPair(_Stream(), _Stream()))
        patch.setattr(alone_head, "CHAIN", length)
        yield
