"""Capturing CUDA graphs while a module runs: cut into several, or nested in conditional nodes, by its taps' hooks.

torch.cuda.CUDAGraph captures one graph at a time, cannot open the body of a conditional node, and leaves PyTorch unfit
for further work when a capture fails. So graphs are captured through CUDA's own calls, with memory from a pool of their
own (torch.cuda.MemPool). See the CUDA programming guide, "CUDA Graphs" and "Conditional Graph Nodes".
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .streams import StreamPair

try:
    from cuda.bindings import runtime
except ImportError:  # where torch has no CUDA
    runtime = None

#: One capture at a time in a process: captures share streams.
CAPTURES = threading.RLock()

#: Untimed forwards before a capture: kernels compile and load, cuDNN chooses algorithms, workspaces are allocated.
_WARM_UP_FORWARDS = 3
_USE_NODE_PRIORITY = 8  # cudaGraphInstantiateFlagUseNodePriority


#: Pairs that no runner has now. They are kept: cuBLAS keeps its workspace of a stream for good.
_free_pairs: dict[torch.device, list[StreamPair]] = {}


class CaptureStreams:
    """Streams that one runner's captures have to themselves for as long as its graphs live.

    A graph keeps the address of the workspace that cuBLAS has for the stream of the capture, so that two graphs which
    may run at the same time must come from different streams. torch's own streams would not do: after 32 of a priority
    it hands out the first again. A kernel keeps the priority of the stream that it was captured on.
    """

    def __init__(self, device: torch.device) -> None:
        """Take streams of ``device``, which is current, as they are asked for."""
        self._device = device
        self._pairs: list[StreamPair] = []

    def levels(self, count: int) -> list[StreamPair]:
        """Return the first ``count`` pairs, one for each nesting level; the same ones every time."""
        free = _free_pairs.setdefault(self._device, [])
        while len(self._pairs) < count:
            try:
                self._pairs.append(free.pop(0))
            except IndexError:
                self._pairs.append(StreamPair(_new_stream(self._device, -1), _new_stream(self._device, 0)))
        return self._pairs[:count]

    def give_back(self) -> None:
        """Let other runners have the streams; nothing captured on them may run any more."""
        pairs = [pair for pair in self._pairs if all(_capture_status(stream) == "None" for stream in pair)]
        self._pairs = []
        _free_pairs.setdefault(self._device, [])[:0] = pairs  # in front: the next runner finds their workspaces


def _new_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    stream = _checked(runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, priority))
    return torch.cuda.ExternalStream(int(stream), device)


class Graph:
    """A captured graph, ready to be launched any number of times."""

    def __init__(self, graph: Any) -> None:
        """Instantiate a captured graph and own it."""
        self._graph = graph
        self._executable = _checked(runtime.cudaGraphInstantiate(graph, _USE_NODE_PRIORITY))

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Launch on ``stream``; does not wait."""
        returned = runtime.cudaGraphLaunch(self._executable, stream.cuda_stream)
        if returned[0]:
            _checked(returned)

    def __del__(self) -> None:
        if hasattr(self, "_executable"):
            runtime.cudaGraphExecDestroy(self._executable)
        runtime.cudaGraphDestroy(self._graph)


class Capture:
    """A capture of one or several graphs on one device."""

    def __init__(self, device: torch.device, pool: torch.cuda.MemPool) -> None:
        """Capture with memory from ``pool``, which must outlive the graphs."""
        self.graphs: list[Graph] = []
        """In the order of the cuts."""
        self.handles: dict[int, int] = {}
        """By the key given to ``open_body``: what a kernel passes to cudaGraphSetConditional."""
        self._device = device
        self._pool = pool
        self._streams: list[torch.cuda.Stream] = []  # that are capturing, from the root to the innermost body
        self._root: Any = None

    @contextmanager
    def capturing(self, backbone: nn.Module, stream: torch.cuda.Stream) -> Iterator[None]:
        """Capture what runs inside, on ``stream``, which is current there.

        Raises:
            RuntimeError: something that cannot be captured; the message names the layer of ``backbone`` that ran.
        """
        before = torch.cuda.current_stream(self._device)
        collects = gc.isenabled()
        gc.disable()  # what it finds may wait for the device, or free memory, which would break the capture
        try:
            with torch.cuda.use_mem_pool(self._pool), _naming_layers(backbone):
                self._begin(stream)
                yield
                self._end()
        finally:
            self._abandon()
            torch.cuda.set_stream(before)
            if collects:
                gc.enable()

    def cut(self) -> None:
        """End the graph here; what follows goes into the next one, which is launched after it."""
        stream = self._streams[0]
        self._end()
        self._begin(stream)

    def open_body(self, key: int, stream: torch.cuda.Stream) -> None:
        """Put what follows, captured on ``stream``, into the body of a node that runs if its condition is 1."""
        current = self._streams[-1]
        graph, dependencies = _capture_state(current)
        handle = _checked(runtime.cudaGraphConditionalHandleCreate(self._root, 0, 0))
        parameters = runtime.cudaGraphNodeParams()
        parameters.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
        parameters.conditional.handle = handle
        parameters.conditional.type = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeIf
        parameters.conditional.size = 1
        node = _checked(runtime.cudaGraphAddNode(graph, dependencies, None, len(dependencies), parameters))
        body = parameters.conditional.phGraph_out[0]
        replace = runtime.cudaStreamUpdateCaptureDependenciesFlags.cudaStreamSetCaptureDependencies
        _checked(runtime.cudaStreamUpdateCaptureDependencies(current.cuda_stream, [node], None, 1, replace))
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        _checked(runtime.cudaStreamBeginCaptureToGraph(stream.cuda_stream, body, None, None, 0, mode))
        self._streams.append(stream)
        torch.cuda.set_stream(stream)
        self.handles[key] = int(handle)

    def _begin(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        _checked(runtime.cudaStreamBeginCapture(stream.cuda_stream, mode))
        self._streams.append(stream)
        self._root = _capture_state(stream)[0]

    def _end(self) -> None:
        while len(self._streams) > 1:  # inside out
            _checked(runtime.cudaStreamEndCapture(self._streams.pop().cuda_stream))
        self.graphs.append(Graph(_checked(runtime.cudaStreamEndCapture(self._streams.pop().cuda_stream))))

    def _abandon(self) -> None:
        """End what is still being captured after an error.

        Where the error has invalidated the capture of a body, the driver frees a graph that the node around it still
        owns as soon as that capture is ended, and crashes later (github.com/NVIDIA/cuda-python/issues/2918). So it is
        left as it is, with its stream, and the graph around it is not freed.
        """
        nested = len(self._streams) > 1
        while self._streams:
            stream = self._streams.pop()
            if nested and _capture_status(stream) != "Active":
                continue
            status, graph = runtime.cudaStreamEndCapture(stream.cuda_stream)
            if not status and not nested:
                runtime.cudaGraphDestroy(graph)
            runtime.cudaGetLastError()  # it was reported by the operation that failed


def warm_up(forward: Callable[[], None], stream: torch.cuda.Stream) -> None:
    """Run what will be captured a few times on the stream of the capture."""
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_FORWARDS):
            forward()
    stream.synchronize()


@contextmanager
def _naming_layers(backbone: nn.Module) -> Iterator[None]:
    """Make an error in a forward of ``backbone`` say in which layer a capture failed."""
    names = {module: name for name, module in backbone.named_modules()}
    thread = threading.get_ident()
    running: list[str] = []

    def enter(module: nn.Module, _inputs: Any) -> None:
        if threading.get_ident() == thread:
            running.append(names[module])

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        if threading.get_ident() == thread:
            running.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    try:
        yield
    except torch.OutOfMemoryError:  # says what is wrong, and no layer is to blame
        raise
    except Exception as error:
        where = f"layer {running[-1]!r}" if running and running[-1] else "the backbone, outside its layers,"
        raise RuntimeError(
            f"backbone: {where} cannot be captured in a CUDA graph ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}); it may make the host wait, or branch on the value of a tensor. The "
            "eager runner runs it as it is"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _capture_state(stream: torch.cuda.Stream) -> tuple[Any, list[Any]]:
    """Return graph and dependencies of a capture under way."""
    _status, _id, graph, dependencies, *_ = _all_checked(runtime.cudaStreamGetCaptureInfo(stream.cuda_stream))
    return graph, list(dependencies)


def _capture_status(stream: torch.cuda.Stream) -> str:
    """Return "None" (not capturing), "Active" or "Invalidated"."""
    status = _checked(runtime.cudaStreamIsCapturing(stream.cuda_stream))
    return str(status.name).removeprefix("cudaStreamCaptureStatus")


def _all_checked(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = returned
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{runtime.cudaGetErrorString(status)[1].decode()} ({status.name})")
    return tuple(values)


def _checked(returned: tuple[Any, ...]) -> Any:
    values = _all_checked(returned)
    return values[0] if values else None
