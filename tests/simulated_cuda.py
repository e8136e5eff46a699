"""Streams and graphs that are none: what runners do around their kernels, on a machine without a GPU.

A "graph" runs on the CPU what was warmed up, all of it in the first graph of a capture; kernels run in Triton's
interpreter. Nothing is skipped, so that this shows what a runner answers, not what it saves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from auxhead.autotune import segments
from auxhead.model import gated_runner, graph_runner, overlapped_runner, polled_runner
from auxhead.model.streams import StreamPair

_CAPTURING = (graph_runner, overlapped_runner, polled_runner, gated_runner, segments)


class _Stream:
    cuda_stream = 1

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


class _Event:
    def __init__(self, **_: Any) -> None:
        pass

    def record(self, _stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, _end: object) -> float:
        return 1.0


class _Streams:
    def __init__(self, _device: torch.device) -> None:
        pass

    pair = StreamPair(_Stream(), _Stream())  # type: ignore[arg-type]

    def give_back(self) -> None:
        pass


class _Graph:
    def __init__(self, run: Callable[[], None] | None) -> None:
        self.launch = lambda _stream: run() if run else None


@contextmanager
def simulated_cuda() -> Iterator[None]:
    """Let runners be made and called on CPU tensors."""
    warmed_up: list[Callable[[], None]] = []

    def warm_up(forward: Callable[[], None], _stream: object) -> None:
        forward()
        warmed_up.append(forward)

    class Capture:
        def __init__(self, *_: Any) -> None:
            self.graphs: list[_Graph] = []

        @contextmanager
        def capturing(self, *_: Any) -> Iterator[None]:
            yield
            self.cut()

        def cut(self) -> None:
            self.graphs.append(_Graph(None if self.graphs else warmed_up[-1]))

    def nested(graphs: list[_Graph]) -> tuple[_Graph, list[int]]:
        return graphs[0], [0] * (len(graphs) - 1)  # no handles: the kernels have no condition to set

    with pytest.MonkeyPatch.context() as patch:
        simulated = {"Capture": Capture, "CaptureStreams": _Streams, "warm_up": warm_up, "nested": nested}
        for module in _CAPTURING:
            for name, value in simulated.items():
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        patch.setattr(graph_runner, "_check_cuda", lambda _x: None)
        for name, value in (
            ("device", lambda _device: nullcontext()),
            ("stream", lambda _stream: nullcontext()),
            ("set_stream", lambda _stream: None),
            ("current_stream", lambda *_: _Stream()),
            ("current_device", lambda: None),
            ("is_current_stream_capturing", lambda: False),
            ("Stream", _Stream),
            ("Event", _Event),
            ("MemPool", lambda: None),
        ):
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(polled_runner, "_LEAST_SEGMENT_US", 0.0)
        patch.setattr(gated_runner, "_LEAST_GATED_US", 0.0)
        yield
