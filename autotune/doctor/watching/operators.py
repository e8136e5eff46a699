"""Dispatch mode that tells of each operator on GPU tensors what it reads and writes; and functions replaced meanwhile.

The mode sees the operators of the thread that enters it, one for each, and those of autograd's threads for a backward
that this thread starts. It does not see launches that are no operators: graphs, Triton kernels, other libraries.
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .accesses import Memory, memory_at, sanitizer_module

#: Copies, which the host waits for altogether if it waits within them.
_COPIES = frozenset({"aten::copy_", "aten::_to_copy"})
#: Gives a view, which its schema does not say.
_UNSAFE_VIEW = "aten::_unsafe_view"


@dataclass
class Touched:
    """What is read and written, each once: by an operator, of the tensors of one device; or by a whole graph."""

    reads: dict[Memory, None] = field(default_factory=dict)
    writes: dict[Memory, None] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorCall:
    """An operator on GPU tensors that has run."""

    name: str
    """aten::mul."""
    devices: Mapping[int, Touched]
    """By number, those of which it only takes or gives views too."""

    @property
    def ends_with_wait(self) -> bool:
        """It is done when the host has waited within it; others may launch more after that, as nonzero does."""
        return self.name in _COPIES or not any(touched.writes for touched in self.devices.values())


class OperatorObserver:
    """What operators are told to, on whatever device; it does nothing here."""

    def operator_begins(self) -> Any:
        """Note that one begins; what is returned is given to :meth:`operator_ended`."""

    def operator_ended(self, begun: Any, call: OperatorCall | None) -> None:
        """Note that it has ended; None: it failed, or was on no GPU."""

    def stream_recorded(self, tensor: Tensor, stream: Any) -> None:
        """Note Tensor.record_stream."""

    def launched_elsewhere(self) -> None:
        """Note an operator that calls functions, or a launch through cuda.bindings: what it runs is not seen."""


class OperatorsMode(TorchDispatchMode):
    """Tells an observer of each operator."""

    supports_higher_order_operators = True  # else torch refuses to run them within a mode

    def __init__(self, observer: OperatorObserver) -> None:
        """Take what notes them."""
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.record_stream.default:
            self._observer.stream_recorded(args[0], args[1])
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self._observer.launched_elsewhere()
            return func(*args, **kwargs)
        inputs = [*_inputs(func, args, kwargs)]  # before it runs: it may give a tensor other memory
        call = None
        begun = self._observer.operator_begins()
        try:
            outputs = func(*args, **kwargs)
            call = _call(func, inputs, outputs)
        finally:
            self._observer.operator_ended(begun, call)
        return outputs


#: A tensor on a GPU, its device, and what is done with it: read (False), written (True), only looked at (None).
_Use = tuple[Memory, int, bool | None]


def _call(func: torch._ops.OpOverload, inputs: list[_Use], outputs: Any) -> OperatorCall | None:
    devices: dict[int, Touched] = {}
    for memory, device, is_write in (*inputs, *_outputs(func, outputs)):
        touched = devices.setdefault(device, Touched())
        if is_write is not None:
            (touched.writes if is_write else touched.reads)[memory] = None
    return OperatorCall(func._schema.name, devices) if devices else None


def _inputs(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Use]:
    schema = func._schema
    name = schema.name.partition("::")[2]
    is_inplace_view = torch.Tag.inplace_view in func.tags  # it writes a tensor's shape: t_, resize_
    looks = is_inplace_view or name.endswith("_like") or name.startswith("new_") or schema.name == _UNSAFE_VIEW
    for argument, value in sanitizer_module().zip_arguments(schema, args, kwargs):
        alias = argument.alias_info
        is_write = alias is not None and alias.is_write and not is_inplace_view
        yield from _uses(value, True if is_write else None if looks or alias is not None else False)


def _outputs(func: torch._ops.OpOverload, outputs: Any) -> Iterator[_Use]:
    schema = func._schema
    is_inplace_view = torch.Tag.inplace_view in func.tags
    returned = outputs if len(schema.returns) > 1 else (outputs,)
    for declared, value in zip(schema.returns, returned, strict=False):
        alias = declared.alias_info
        is_view = schema.name == _UNSAFE_VIEW or (alias is not None and (is_inplace_view or not alias.is_write))
        yield from _uses(value, None if is_view else True)


def _uses(value: Any, is_write: bool | None) -> Iterator[_Use]:
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor) and is_on_gpu(tensor):
            memory = memory_at(tensor)
            if memory is not None:
                yield memory, device_of(tensor), is_write


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a CUDA device."""
    return tensor.is_cuda


def device_of(tensor: Tensor) -> int:
    """Return the number of a tensor's device."""
    return tensor.get_device()


class GraphMemory(Touched, OperatorObserver):
    """What a graph's operators read and write; Triton kernels and other libraries are not among them."""

    def operator_ended(self, begun: Any, call: OperatorCall | None) -> None:
        """Add what an operator does."""
        for touched in call.devices.values() if call is not None else ():
            self.writes |= touched.writes
            self.reads |= touched.reads


class _CapturedOperators(OperatorsMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run compiled: within other modes they run eagerly, and do so ever after."""
        return True


_noted: WeakKeyDictionary[torch.cuda.CUDAGraph, GraphMemory] = WeakKeyDictionary()


def memory_of_graph(graph: torch.cuda.CUDAGraph) -> GraphMemory | None:
    """Return what was noted when a graph was captured; None: it was captured before, or by something else."""
    return _noted.get(graph)


@contextmanager
def noting_captures() -> Iterator[None]:
    """Note what graphs access that PyTorch captures within this block."""
    modes: dict[torch.cuda.CUDAGraph, _CapturedOperators] = {}

    def begin(original: Callable[..., Any], graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
        original(graph, *args, **kwargs)
        noted = _noted[graph] = GraphMemory()
        modes[graph] = _CapturedOperators(noted)
        modes[graph].__enter__()

    def end(original: Callable[..., Any], graph: torch.cuda.CUDAGraph) -> None:
        if graph in modes:
            modes.pop(graph).__exit__(None, None, None)
        original(graph)

    with ExitStack() as stack:
        replace(stack, torch.cuda.CUDAGraph, "capture_begin", begin)
        replace(stack, torch.cuda.CUDAGraph, "capture_end", end)
        yield


def replace(stack: ExitStack, holder: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Have calls of an attribute call ``replacement`` until the stack closes, with the original and their arguments."""
    own = vars(holder).get(name)  # None: inherited; the method of a class itself, and not a function bound to it
    if own is None:
        stack.callback(delattr, holder, name)
    else:
        stack.callback(setattr, holder, name, own)
    original = getattr(holder, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(holder, name, staticmethod(replaced) if name == "__new__" else replaced)


@contextmanager
def waits_heard(host_waited: Callable[[], None]) -> Iterator[None]:
    """Have PyTorch warn of operators in which the host waits, and tell of them instead; other warnings are as before.

    See https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        show, mode = warnings.showwarning, torch.cuda.get_sync_debug_mode()

        def hear(message: Any, *args: Any, **kwargs: Any) -> None:
            if "called a synchronizing CUDA operation" in str(message):
                host_waited()
            elif "Synchronization debug mode" not in str(message):
                show(message, *args, **kwargs)

        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def within_threads(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Let threads that begin meanwhile, and what is submitted to pools, run within a new context each.

    The workers of a pool outlive what they are given, so that it is that which runs within one, and not the worker.
    """

    def within(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    def submit(original: Callable[..., Future[Any]], pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return original(pool, within, function, *args, **kwargs)

    def start(original: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
        target = getattr(thread, "_target", None)
        if getattr(target, "__module__", None) != ThreadPoolExecutor.__module__:
            thread.run = functools.partial(within, thread.run)  # type: ignore[method-assign]
        original(thread)

    with ExitStack() as stack:
        replace(stack, ThreadPoolExecutor, "submit", submit)
        replace(stack, threading.Thread, "start", start)
        yield
