"""CUDA graphs captured while a module runs, cut by its taps' hooks, to be launched one by one or nested in conditions.

torch.cuda.CUDAGraph has no conditional nodes, and leaves PyTorch unfit for further work when a capture fails. So graphs
are captured through CUDA's own calls, with memory from a pool of their own. See the CUDA programming guide, "CUDA
Graphs" and "Conditional Graph Nodes".
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ...kernels.cuda.lifetimes import MemoryPool, empty_cache, keep_in_children
from ...kernels.cuda.runtime import checked, runtime
from ..basics.garbage import no_garbage_collection
from ..basics.streams import OwnedLock
from ..listening.hooks import ThreadHook
from ..listening.recording import OperatorMode
from .captured_network import Addresses

#: Held by a runner while it captures: captures share streams.
CAPTURE_LOCK = OwnedLock()

#: Untimed forwards before a capture: kernels compile and load, cuDNN chooses algorithms, workspaces are allocated.
_WARM_UP_FORWARDS = 3
_USE_NODE_PRIORITY = 8  # cudaGraphInstantiateFlagUseNodePriority


class Graph:
    """A captured graph, ready to be launched any number of times."""

    def __init__(self, graph: Any, *used: object) -> None:
        """Own a graph, whether or not it can be instantiated; what it has ``used`` lives as long as it."""
        self.template = graph
        self.used = used
        keep_in_children(self)
        self._executable = checked(runtime.cudaGraphInstantiate(graph, _USE_NODE_PRIORITY))

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Launch on ``stream``; does not wait."""
        returned = runtime.cudaGraphLaunch(self._executable, stream.cuda_stream)
        if returned[0]:
            checked(returned)

    def __del__(self, _python_ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if _python_ends():  # which clears this module
            return
        if hasattr(self, "_executable"):
            runtime.cudaGraphExecDestroy(self._executable)
        if hasattr(self, "template"):
            runtime.cudaGraphDestroy(self.template)


def nest_in_conditions(graphs: Sequence[Graph]) -> tuple[Graph, list[int]]:
    """Put copies of graphs into one, each but the first in the body of a condition that the graph before it sets.

    The graphs are captured first and not into the bodies: when the capture of a body fails and is ended, the driver
    frees a graph that the node around it still owns (github.com/NVIDIA/cuda-python/issues/2918).

    Returns:
        The graph, and the handle of each condition, which a kernel passes to cudaGraphSetConditional.
    """
    root = checked(runtime.cudaGraphCreate(0))
    body, handles = root, []
    try:
        for graph in graphs[:-1]:
            segment = checked(runtime.cudaGraphAddChildGraphNode(body, None, 0, graph.template))
            handles.append(checked(runtime.cudaGraphConditionalHandleCreate(root, 0, 0)))
            condition = runtime.cudaGraphNodeParams()
            condition.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
            condition.conditional.handle = handles[-1]
            condition.conditional.type = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeIf
            condition.conditional.size = 1
            checked(runtime.cudaGraphAddNode(body, [segment], None, 1, condition))
            body = condition.conditional.phGraph_out[0]
        checked(runtime.cudaGraphAddChildGraphNode(body, None, 0, graphs[-1].template))
    except BaseException:
        runtime.cudaGraphDestroy(root)
        raise
    return Graph(root, *(used for graph in graphs for used in graph.used)), [int(handle) for handle in handles]


def copy_memory(into: int, source: int, size: int, stream: int) -> None:
    """Copy ``size`` bytes between addresses on a device, on the stream of that handle; does not wait."""
    returned = runtime.cudaMemcpyAsync(into, source, size, runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, stream)
    if returned[0]:
        checked(returned)


def copy_between(into: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
    """Copy memory of one layout, on a device or between two, on a stream of one of them; does not wait.

    ``Tensor.copy_`` takes the host twice the time, and would order the current streams of both devices.
    """
    copy_memory(into.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream)


class CapturedReads(OperatorMode):
    """Notes while a capture runs which memory its operators are given that none of them has allocated.

    A graph holds addresses and no references. Parameters stay, as a rule; a mask that a layer keeps for the last size
    it was called with goes at the next call with another one.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Begin with all tensors that modules and their layers hold: kernels may get them by ways of their own."""
        super().__init__()
        self._read: dict[int, Any] = {}  # storages, by their addresses
        self._made: dict[int, StorageWeakRef] = {}  # which keep the addresses from others, until the capture ends
        self._parameters: set[int] = set()
        for module in modules:
            for layer in module.modules():
                self._keep(vars(layer))
                self._parameters |= {storage._cdata for storage, _ in _storages((layer._parameters, layer._buffers))}

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        self._keep((args, kwargs))
        outputs = func(*args, **kwargs or {})
        for storage, _ in _storages(outputs):
            if storage._cdata not in self._read and isinstance(storage, UntypedStorage):
                self._made[storage._cdata] = StorageWeakRef(storage)
        return outputs

    def forget_made(self) -> None:
        """Let go of the addresses of what was made; not in ``__exit__``, which an interrupt must not find halfway."""
        self._made.clear()

    def _keep(self, read: Any) -> None:
        for storage, is_cpu in _storages(read):
            if storage._cdata not in self._made or is_cpu:  # copies from the host are read at every launch
                self._read[storage._cdata] = storage

    def resizable(self, static: Sequence[Tensor]) -> Addresses:
        """Return what was read that is no parameter or buffer, and no static input: a layer may resize it."""
        others = {*self._parameters, *(x.untyped_storage()._cdata for x in static)}
        return {
            key: (storage, storage.data_ptr())
            for key, storage in self._read.items()
            if key not in others and isinstance(storage, UntypedStorage)
        }


def _storages(tree: Any) -> Iterator[tuple[Any, bool]]:
    """Yield the storages of all tensors, and those in tensors of other classes, each with whether it is on the CPU.

    A tensor that has none (sparse, say) stands for itself; both have a ``_cdata``.
    """
    for value in tree_leaves(tree):
        if is_traceable_wrapper_subclass(value):
            yield from _storages([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, Tensor):
            try:
                yield value.untyped_storage(), value.is_cpu
            except (NotImplementedError, RuntimeError):
                yield value, value.is_cpu


class Capture:
    """A capture of one or several graphs on one device."""

    def __init__(self, device: torch.device, memory: MemoryPool) -> None:
        """Capture with memory from a pool, which lives as long as the graphs."""
        self.graphs: list[Graph] = []
        """Graphs captured so far, in the order of the cuts."""
        self._device = device
        self._memory = memory
        self.reads: CapturedReads | None = None
        """Memory that the graphs read."""
        self._stream: torch.cuda.Stream | None = None  # that is capturing

    @contextmanager
    def capturing(self, stream: torch.cuda.Stream, backbone: nn.Module, *others: nn.Module) -> Iterator[None]:
        """Capture what runs inside, on ``stream``, which is current there.

        Graphs keep the memory alive that they read of ``backbone``, of other modules and of whatever else.

        Raises:
            RuntimeError: something that cannot be captured; the message names the layer of ``backbone`` that ran.
        """
        with ExitStack() as stack:
            stack.callback(torch.cuda.set_stream, torch.cuda.current_stream(self._device))
            stack.enter_context(no_garbage_collection())
            self.reads = CapturedReads([backbone, *others])
            stack.enter_context(self._memory.allocating())
            stack.enter_context(naming_layers(backbone, *others))
            stack.callback(self._abandon)
            stack.callback(self.reads.forget_made)
            stack.enter_context(self.reads)
            self._begin(stream)
            yield
            self._end()

    def cut(self) -> None:
        """End the graph here; what follows goes into the next one, which is launched after it."""
        stream = self._stream
        assert stream is not None
        self._end()
        self._begin(stream)

    def _begin(self, stream: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(stream)
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        self._stream = stream  # before it begins: an interrupt may come as soon as it has
        checked(runtime.cudaStreamBeginCapture(stream.cuda_stream, mode))

    def _end(self) -> None:
        assert self._stream is not None
        graph = Graph(checked(runtime.cudaStreamEndCapture(self._stream.cuda_stream)), self._memory, self.reads)
        self._stream = None
        self.graphs.append(graph)

    def _abandon(self) -> None:
        """End what may still be being captured after an error or an interrupt."""
        if self._stream is not None:
            status, graph = runtime.cudaStreamEndCapture(self._stream.cuda_stream)
            if not status:
                runtime.cudaGraphDestroy(graph)
            runtime.cudaGetLastError()  # it was reported by the operation that failed
            self._stream = None


def warm_up(forward: Callable[[], object], refill: Callable[[], object], stream: torch.cuda.Stream) -> None:
    """Run what will be captured a few times on the stream of the capture, and give back the memory that this took.

    ``refill`` writes the input before each run, which a backbone may change in place. It is not run in the memory of
    the graphs: what it leaves behind, a layer's mask or a head's workspace, would lie where earlier graphs write.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_FORWARDS):
            refill()
            forward()
    stream.synchronize()
    empty_cache()  # as torch.cuda.graph does: a capture cannot make the allocator give up what it keeps


class NotCapturable(RuntimeError):
    """No CUDA graph can hold a network."""


@contextmanager
def naming_layers(backbone: nn.Module, *others: nn.Module) -> Iterator[None]:
    """Make an error in a forward of ``backbone``, or in one of another module's layers, say where a capture failed."""
    names = {module: name for each in (*others, backbone) for name, module in each.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, _inputs: Any) -> None:
        running.append(names[module])

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        running.pop()

    with ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_pre_hook(ThreadHook(enter)).remove)
            hooks.callback(module.register_forward_hook(ThreadHook(leave)).remove)
        try:
            yield
        except torch.OutOfMemoryError:  # says what is wrong, and no layer is to blame
            raise
        except Exception as error:
            where = f"layer {running[-1]!r}" if running and running[-1] else "the backbone, outside its layers,"
            raise NotCapturable(
                f"backbone: {where} cannot be captured in a CUDA graph ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}); it may make the host wait, or branch on the value of a tensor. "
                "The eager runner runs it as it is"
            ) from error
