"""Memory that graphs access, noted as PyTorch captures them: a replay then counts as an operator on all of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .memory import Memory
from .operators import OperatorCall, OperatorsMode
from .torch_patches import replace


@dataclass
class GraphMemory:
    """What a graph's operators read and write; Triton kernels and other libraries are not among them."""

    reads: dict[Memory, None] = field(default_factory=dict)
    writes: dict[Memory, None] = field(default_factory=dict)

    def ran(self, call: OperatorCall) -> None:
        """Add what an operator does."""
        for touched in call.devices.values():
            self.writes.update(dict.fromkeys(touched.writes))
            self.reads.update(dict.fromkeys(touched.reads))


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

    def beginning(original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: torch.cuda.CUDAGraph, *args: Any, **kwargs: Any) -> None:
            original(graph, *args, **kwargs)
            noted = _noted[graph] = GraphMemory()

            def ended(_begun: None, call: OperatorCall | None) -> None:
                if call is not None:
                    noted.ran(call)

            modes[graph] = _CapturedOperators(lambda: None, ended, lambda *_: None, lambda: None)
            modes[graph].__enter__()

        return capture_begin

    def ending(original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: torch.cuda.CUDAGraph) -> None:
            if graph in modes:
                modes.pop(graph).__exit__(None, None, None)
            original(graph)

        return capture_end

    with ExitStack() as stack:
        replace(stack, torch.cuda.CUDAGraph, "capture_begin", beginning)
        replace(stack, torch.cuda.CUDAGraph, "capture_end", ending)
        yield
