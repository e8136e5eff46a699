"""CUDA graphs captured while a module runs, cut by its taps' hooks, to be launched one by one or nested in conditions.

torch.cuda.CUDAGraph has no conditional nodes, and leaves PyTorch unfit for further work when a capture fails. So graphs
are captured through CUDA's own calls, with memory from a pool of their own (torch.cuda.MemPool). See the CUDA
programming guide, "CUDA Graphs" and "Conditional Graph Nodes".
"""

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from ..streams import StreamPair

try:
    from cuda.bindings import runtime
except ImportError:  # where torch has no CUDA
    runtime = None

#: Held by a runner while it captures: captures share streams.
CAPTURE_LOCK = threading.RLock()

#: Untimed forwards before a capture: kernels compile and load, cuDNN chooses algorithms, workspaces are allocated.
_WARM_UP_FORWARDS = 3
_USE_NODE_PRIORITY = 8  # cudaGraphInstantiateFlagUseNodePriority

_T = TypeVar("_T")

#: Pairs that no runner has now, by device and the trunk's priority. They are kept: cuBLAS keeps its workspace of a
#: stream for good.
_free_pairs: dict[tuple[torch.device, int], list[StreamPair]] = {}


def take_streams(device: torch.device, trunk_priority: int) -> StreamPair:
    """Take streams of ``device``, which is current, for one runner's captures as long as its graphs live.

    A graph keeps the address of the workspace that cuBLAS has for the stream of the capture, so that two graphs which
    may run at the same time must come from different streams. torch's own streams would not do: after 32 of a priority
    it hands out the first again. A kernel keeps the priority of the stream that it was captured on; the side stream's
    is 0.
    """
    free = _free_pairs.setdefault((device, trunk_priority), [])
    return free.pop(0) if free else StreamPair(_new_stream(device, trunk_priority), _new_stream(device, 0))


def give_back_streams(device: torch.device, trunk_priority: int, pair: StreamPair) -> None:
    """Let other runners have the streams; nothing captured on them may run any more."""
    _free_pairs[device, trunk_priority].insert(0, pair)  # in front: the next runner finds their workspaces


def _new_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    stream = _checked(runtime.cudaStreamCreateWithPriority(runtime.cudaStreamNonBlocking, priority))
    return torch.cuda.ExternalStream(int(stream), device)


class Graph:
    """A captured graph, ready to be launched any number of times."""

    def __init__(self, graph: Any) -> None:
        """Instantiate a graph and, if that succeeds, own it."""
        self._executable = _checked(runtime.cudaGraphInstantiate(graph, _USE_NODE_PRIORITY))
        self.template = graph

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Launch on ``stream``; does not wait."""
        returned = runtime.cudaGraphLaunch(self._executable, stream.cuda_stream)
        if returned[0]:
            _checked(returned)

    def __del__(self) -> None:
        if hasattr(self, "_executable"):
            runtime.cudaGraphExecDestroy(self._executable)
            runtime.cudaGraphDestroy(self.template)


def nest_in_conditions(graphs: Sequence[Graph]) -> tuple[Graph, list[int]]:
    """Put copies of graphs into one, each but the first in the body of a condition that the graph before it sets.

    The graphs are captured first and not into the bodies: when the capture of a body fails and is ended, the driver
    frees a graph that the node around it still owns (github.com/NVIDIA/cuda-python/issues/2918).

    Returns:
        The graph, and the handle of each condition, which a kernel passes to cudaGraphSetConditional.
    """
    root = _checked(runtime.cudaGraphCreate(0))
    body, handles = root, []
    try:
        for graph in graphs[:-1]:
            segment = _checked(runtime.cudaGraphAddChildGraphNode(body, None, 0, graph.template))
            handles.append(_checked(runtime.cudaGraphConditionalHandleCreate(root, 0, 0)))
            condition = runtime.cudaGraphNodeParams()
            condition.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
            condition.conditional.handle = handles[-1]
            condition.conditional.type = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeIf
            condition.conditional.size = 1
            _checked(runtime.cudaGraphAddNode(body, [segment], None, 1, condition))
            body = condition.conditional.phGraph_out[0]
        _checked(runtime.cudaGraphAddChildGraphNode(body, None, 0, graphs[-1].template))
        return Graph(root), [int(handle) for handle in handles]
    except BaseException:
        runtime.cudaGraphDestroy(root)
        raise


def copy_memory(into: int, source: int, size: int, stream: int) -> None:
    """Copy ``size`` bytes between addresses on a device, on the stream of that handle; does not wait."""
    returned = runtime.cudaMemcpyAsync(into, source, size, runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, stream)
    if returned[0]:
        _checked(returned)


class Capture:
    """A capture of one or several graphs on one device."""

    def __init__(self, device: torch.device, pool: torch.cuda.MemPool) -> None:
        """Capture with memory from ``pool``, which must outlive the graphs."""
        self.graphs: list[Graph] = []
        """Graphs captured so far, in the order of the cuts."""
        self._device = device
        self._pool = pool
        self._stream: torch.cuda.Stream | None = None  # that is capturing

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
        stream = self._stream
        assert stream is not None
        self._end()
        self._begin(stream)

    def _begin(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        _checked(runtime.cudaStreamBeginCapture(stream.cuda_stream, mode))
        self._stream = stream

    def _end(self) -> None:
        stream, self._stream = self._stream, None
        assert stream is not None
        self.graphs.append(Graph(_checked(runtime.cudaStreamEndCapture(stream.cuda_stream))))

    def _abandon(self) -> None:
        """End what is still being captured after an error."""
        if self._stream is not None:
            status, graph = runtime.cudaStreamEndCapture(self._stream.cuda_stream)
            if not status:
                runtime.cudaGraphDestroy(graph)
            runtime.cudaGetLastError()  # it was reported by the operation that failed
            self._stream = None


def capture_graphs(
    forward: Callable[[Callable[[], None]], _T],
    backbone: nn.Module,
    device: torch.device,
    stream: torch.cuda.Stream,
    pool: torch.cuda.MemPool,
) -> tuple[list[Graph], _T]:
    """Warm up and capture a forward, which is given a function that ends one graph and begins the next.

    Errors name layers of the ``backbone`` that it runs. The ``pool`` holds the graphs' memory and must outlive them.

    Returns:
        The graphs in their order, and what the captured forward returned.
    """
    warm_up(lambda: forward(lambda: None), stream)
    capture = Capture(device, pool)
    with capture.capturing(backbone, stream):
        result = forward(capture.cut)
    return capture.graphs, result


def warm_up(forward: Callable[[], object], stream: torch.cuda.Stream) -> None:
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


def _checked(returned: tuple[Any, ...]) -> Any:
    status, *values = returned
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{runtime.cudaGetErrorString(status)[1].decode()} ({status.name})")
    return values[0] if values else None
