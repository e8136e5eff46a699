"""Fake CUDA streams and graphs for testing runners without a GPU.

A "graph" runs again on the CPU what ran during its capture, into the same memory; kernels run in Triton's interpreter.
Bodies of conditional nodes run whatever the condition is. So this shows what a runner answers, not what it saves.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from auxhead.autotune.measuring import captured, heads_alone
from auxhead.kernels.launch.arrival_counters import ArrivalCounters
from auxhead.kernels.launch.memory import HeadArguments
from auxhead.model.answers import rule_order
from auxhead.model.basics import streams
from auxhead.model.basics.streams import StreamPair
from auxhead.model.network import eager_pass
from auxhead.model.runners import checks, program
from auxhead.model.runners import compacting as compacting_runner
from auxhead.model.runners import gated as gated_runner
from auxhead.model.runners import polled as polled_runner
from support import stream_order
from support.failing import launching
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class CaptureStreams:
    """Streams of one runner's captures."""

    lent = 0
    """Pairs that runners have."""

    def __init__(self) -> None:
        self.trunk, self.side = stream_order.Stream(), stream_order.Stream()
        CaptureStreams.lent += 1

    def allocate_workspaces(self, stream: stream_order.Stream) -> None:
        pass

    def wait(self) -> None:
        self.trunk.synchronize()
        self.side.synchronize()

    def give_back(self) -> None:
        CaptureStreams.lent -= 1


def simulated_events(patch: pytest.MonkeyPatch) -> None:
    """Let timers run on the CPU until the test of ``patch`` ends: each device time is a millisecond."""
    patch.setattr(torch.cuda, "Event", stream_order.Event)
    patch.setattr(torch.cuda, "synchronize", lambda _device=None: None)


class _Graph:
    """Calls that a recorder noted, to be run again; it keeps all memory of that run."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def launch(self, stream: stream_order.Stream) -> None:
        with torch.no_grad(), stream_order.current(stream), launching():
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


_idle: list[None] = []


@contextmanager
def idle_kernels() -> Iterator[None]:
    """Let kernels be launched, and do nothing: where nobody reads what they write, that is all the same, and faster."""
    _idle.append(None)
    try:
        yield
    finally:
        _idle.pop()


_poll = polled_runner.PolledRunner._poll


def _polled(runner: polled_runner.PolledRunner, captured: polled_runner.PolledBatch, stop: int) -> int:
    """Poll; then the host knows that the launch which has written the number is over, and nothing of what follows."""
    still_open = _poll(runner, captured, stop)
    stream_order.order.see()
    return still_open


#: Arguments that kernels read; all other tensors they may write.
_READ = {"x", "valid", "patience", "destinations", "origin"}
_READ_BY = {"gather_kernel": {"features", "label", "exit_index", "confidence", "probs"}}
_READ_BY["collect_kernel"] = _READ_BY["gather_kernel"]


def _kernel_accesses(executor: Any, args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that a kernel will read and those that it will write."""
    given = dict(zip(executor.arg_names, args, strict=False))
    kernel = executor.fn.__name__
    not_written: set[str] = _READ | _READ_BY.get(kernel, set())
    if kernel == "gather_kernel" and not given["destinations"][int((given["exit_index"] < 0).sum())].any():
        return [given["destinations"], given["exit_index"]], []  # nothing is moved
    reads, writes = [], []
    if kernel == "pack_kernel":
        for x, features, _ in given.pop("packed"):
            reads.append(x)
            writes.append(features)
    if kernel == "exit_kernel":
        if given["LAUNCH"].first > 0 and not (given["answer"][3] < 0).any():
            not_written |= {"answer"}  # all have left
        for arguments, _ in given.pop("places"):
            head = HeadArguments(*arguments) if len(arguments) > 3 else None
            writes += [] if head is None else [head.workspace, (head.last or [None])[-1]]
            reads += arguments if head is None else head._replace(workspace=(), last=(head.last or ())[:-1])
        if given["LAUNCH"].merges:
            *written, condition = given.pop("told")
            reads.append(condition)
            writes += written
    for name, value in given.items():
        (reads if name in not_written else writes).append(value)
    tensors = [[one for one in tree_leaves(some) if isinstance(one, torch.Tensor)] for some in (reads, writes)]
    return tensors[0], tensors[1]


def _counters_of_streams() -> Callable[[ArrivalCounters, int], torch.Tensor]:
    """Give each stream counters of its own, which on the CPU all launches share."""
    by_stream: dict[stream_order.Stream, ArrivalCounters] = {}

    def take(counters: ArrivalCounters, count: int) -> torch.Tensor:
        own = by_stream.setdefault(stream_order.order.current, ArrivalCounters(counters._device))
        return own._of_stream(0, count)

    return take


@contextmanager
def simulated_cuda() -> Iterator[None]:
    """Let runners be made and called on CPU tensors."""
    from triton.runtime.interpreter import GridExecutor  # there is no Triton for some platforms

    recording: list[_Recorder] = []  # at most one

    def warm_up(forward: Callable[[], None], refill: Callable[[], None], stream: stream_order.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with stream_order.current(stream):
            refill()
            forward()
        stream.synchronize()

    compare = program.StaticInput.look_for_changes

    def look_for_changes(static: program.StaticInput) -> None:
        compare(static)
        static.refill()  # before the capture, which runs all once more
        torch.cuda.current_stream().synchronize()

    interpret = GridExecutor.__call__

    def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        def again() -> None:
            accesses = _kernel_accesses(executor, args)
            if not _idle and not recording:  # what is captured is not run
                with _disable_current_modes():
                    interpret(executor, *args, **kwargs)
            stream_order.order.work(executor.fn.__name__, *accesses)
            if (dict(zip(executor.arg_names, args, strict=False)).get("told") or [None])[0] is not None:
                stream_order.order.publish()

        again()
        if recording:
            recording[0].graph.calls.append(again)

    class Capture:
        reads = None

        def __init__(self, *_: Any) -> None:
            self.graphs: list[_Graph] = []

        @contextmanager
        def capturing(self, stream: stream_order.Stream, *_: Any) -> Iterator[None]:
            recording.append(_Recorder(_Graph()))
            try:
                with recording[0], stream_order.current(stream):  # a capture runs nothing, but is simulated by a run
                    yield
                self.cut()
            finally:
                recording.clear()
                stream.synchronize()

        def cut(self) -> None:
            self.graphs.append(recording[0].graph)
            recording[0].graph = _Graph()

    def copy_between(into: torch.Tensor, source: torch.Tensor, stream: stream_order.Stream) -> None:
        with stream_order.current(stream):
            into.copy_(source)

    def nest_in_conditions(graphs: list[_Graph]) -> tuple[_Graph, list[int]]:
        root = _Graph()
        root.calls = [call for graph in graphs for call in graph.calls]
        return root, [0] * (len(graphs) - 1)  # no handles: the kernels have no condition to set

    with pytest.MonkeyPatch.context() as patch:
        simulated = {
            "Capture": Capture,
            "take_streams": lambda _device, _priority: CaptureStreams(),
            "MemoryPool": lambda _device: object(),
            "beside_captures": nullcontext,
            "is_capturing": lambda _device: False,
            "_check_allocator": lambda: None,
            "warm_up": warm_up,
            "copy_between": copy_between,
            "nest_in_conditions": nest_in_conditions,
        }
        for module in [module for name, module in sys.modules.items() if name.startswith("auxhead.")]:
            for name in simulated.keys() & vars(module).keys():
                patch.setattr(module, name, simulated[name])
        patch.setattr(GridExecutor, "__call__", launch)
        patch.setattr(checks, "_check_cuda", lambda _x: None)
        stream_order.patched(patch)
        pair = StreamPair(stream_order.Stream(), stream_order.Stream())
        patch.setattr(rule_order, "stream_pair", lambda _device: pair)
        for module in (eager_pass, rule_order):
            patch.setattr(module, "has_streams", lambda _x: True)
        patch.setattr(ArrivalCounters, "take", _counters_of_streams())
        patch.setattr(streams, "new_stream", lambda _device, _priority: stream_order.Stream())
        patch.setattr(streams, "stream_number", lambda _handle: id(stream_order.order.current))
        patch.setattr(streams, "current_handle", lambda _device: stream_order.order.current.cuda_stream)
        patch.setattr(program.StaticInput, "look_for_changes", look_for_changes)
        patch.setattr(polled_runner.PolledRunner, "_poll", _polled)
        for name, value in (
            ("capture_id", lambda _handle: None),
            ("current_handle", lambda _device: stream_order.order.current.cuda_stream),
        ):
            patch.setattr(rule_order, name, value)
        for name, value in (
            ("device", lambda _device: nullcontext()),
            ("current_device", lambda: None),
            ("is_current_stream_capturing", lambda: False),
            ("_sleep", lambda _cycles: None),
        ):
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        patch.setattr(torch.Tensor, "is_pinned", lambda _tensor: False)  # whose answer looks like a wait
        patch.setattr(torch, "empty_like", partial(_empty_like, torch.empty_like))
        patch.setattr(polled_runner, "_LEAST_SEGMENT_US", 0.0)
        patch.setattr(compacting_runner, "_LEAST_STOP_US", 0.0)
        patch.setattr(gated_runner, "_LEAST_GATED_US", 0.0)
        with stream_order.Watching():
            yield


def _empty_like(empty_like: Callable[..., torch.Tensor], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
    return empty_like(*args, **kwargs)


@contextmanager
def simulated_chains(patch: pytest.MonkeyPatch, length: int) -> Iterator[None]:
    """Simulate CUDA for chains of ``length`` launches in torch's graphs, too, until the test of ``patch`` ends."""

    @contextmanager
    def graph(_graph: object, stream: object) -> Iterator[None]:
        yield

    with simulated_cuda():
        stream_order.order.checks = False
        patch.setattr(torch.cuda, "graph", graph)
        for module in (captured, heads_alone):
            patch.setattr(
                module, "stream_pair", lambda _device: StreamPair(stream_order.Stream(), stream_order.Stream())
            )
        patch.setattr(captured, "CHAIN", length)
        yield
