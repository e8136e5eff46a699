"""``CompiledPart``: a part of a traced backbone that Inductor compiles, without Dynamo, which would trace it again."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..listening.kept import shallow_copy
from .inductor import Kind, TracedGraph, as_bytes, compile_graph, fakes_of
from .layer_graph import TRACES, is_known, runs_users_code

#: Graphs that were compiled; they serve all parts that are traced to the same.
Compiled = dict[TracedGraph, Callable[..., Any]]
#: Takes a graph that is to be among those that were compiled.
HandOver = Callable[[TracedGraph, Compiled], None]
#: Sizes, layouts and types that a part is compiled for, each of which takes seconds; further ones run uncompiled.
MOST_KINDS = 8


class CompiledPart(nn.Module):
    """Runs a graph of layers, compiled at the first call with new sizes, layouts or types of inputs, or under autocast.

    Of an EfficientNet Dynamo takes 1.5 s to trace what is a graph already, and this 0.15 s: in each process, since no
    cache keeps a trace.
    """

    def __init__(self, part: fx.GraphModule, shared: Compiled | None = None, begins_early: bool = False) -> None:
        """Compile ``part``, which is run without gradients; what is ``shared`` among parts is compiled once.

        Its launches are as Inductor has them, or ``begins_early`` as :func:`beginning_early` does.
        """
        super().__init__()
        self.part = part
        self._begins_early = begins_early
        self._shared: Compiled = {} if shared is None else shared
        self._traced: dict[Any, Traced] = {}
        # With the inputs that it changes; None where it is not compiled.
        self._compiled: dict[Any, tuple[Callable[..., Any], Sequence[int]] | None] = {}

    def forward(self, *inputs: Any) -> Any:
        """Run for inputs as ``part`` takes them; within :func:`handing_over` uncompiled."""
        state = _state(self.part)
        leaves, form = tree_flatten(inputs)
        if any(isinstance(each, Tensor) and (each.is_neg() or each.is_conj()) for each in leaves):
            return self.part(*inputs)  # compiled code reads the memory as it is
        tensors = [each.detach() for each in (*state.values(), *leaves) if isinstance(each, Tensor)]
        kinds = tuple((each.shape, each.stride(), each.dtype, each.device) for each in tensors)
        casts = [torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cpu", "cuda")]
        kind = (str(form), kinds, *casts, *(each for each in leaves if not isinstance(each, Tensor)))
        hand_over = _hand_over.get()
        if kind not in self._compiled:
            if len(self._compiled) == MOST_KINDS:
                return self.part(*inputs)
            with torch.inference_mode(False), torch.no_grad():
                traced = self._traced.pop(kind, None) or self._trace(list(state), leaves, form, kinds)
                if hand_over is not None and traced is not None:
                    self._traced[kind] = traced
                    hand_over(traced.graph, self._shared)
                    return self.part(*inputs)
                self._compiled[kind] = traced and (traced.compiled(self._shared), traced.written)
        found = self._compiled[kind]
        return self.part(*inputs) if found is None or _overlap(tensors, found[1]) else found[0](*tensors)

    def _trace(self, names: Sequence[str], leaves: Sequence[Any], form: Any, kinds: Sequence[Kind]) -> "Traced | None":
        """Trace the part; None if it gives an input another shape or memory, which no compiled code does for others."""
        from torch.fx.experimental.proxy_tensor import make_fx

        part = shallow_copy(self.part, {})  # whose parameters are others meanwhile: other threads may run the part
        returned: list[Any] = []  # all that is returned, in which tensors stand for themselves, and its form
        written: list[int] = []
        lies: list[bool] = []

        def run(*given: Tensor) -> list[Tensor]:
            state, rest = dict(zip(names, given, strict=False)), iter(given[len(names) :])
            inputs = tree_unflatten([next(rest) if isinstance(each, Tensor) else each for each in leaves], form)
            versions, places = [each._version for each in given], [*map(_place, given)]
            returned[:] = tree_flatten(functional_call(part, state, inputs, tie_weights=False))
            written[:] = [index for index, each in enumerate(given) if each._version != versions[index]]
            lies[:] = [place == _place(each) for place, each in zip(places, given, strict=True)]
            return [each for each in returned[0] if isinstance(each, Tensor)]

        with TRACES:
            graph = make_fx(run, tracing_mode="real")(*fakes_of(kinds)[1])
        if not all(lies):
            return None
        _move_numbers(graph)
        others = [None if isinstance(each, Tensor) else (each,) for each in returned[0]]
        return Traced(TracedGraph(as_bytes(graph), kinds, self._begins_early), others, returned[1], written)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Return what says which numbers of which memory a tensor holds."""
    return x.shape, x.stride(), x.storage_offset(), x.untyped_storage()._cdata


def _overlap(tensors: Sequence[Tensor], written: Sequence[int]) -> bool:
    """Return whether any that is written to shares memory with another, of which a compiler knows nothing."""
    if not written:
        return False
    memory = Counter(each.untyped_storage()._cdata for each in tensors)
    return any(memory[tensors[index].untyped_storage()._cdata] > 1 for index in written)


def _move_numbers(graph: fx.GraphModule) -> None:
    """Let numbers be on the device of what takes them, where the trace has them in tensors on the CPU.

    ``y[0] = 3`` is traced so, and Inductor would make a copy between devices of it, which no graph can capture.
    """
    for node in graph.graph.nodes:
        if node.target is not torch.ops.aten.lift_fresh_copy.default:
            continue
        number = getattr(graph, node.args[0].target)
        if number.ndim or number.device.type != "cpu":
            continue
        for user in list(node.users):
            values = [each.meta.get("val") for each in user.all_input_nodes]
            devices = {each.device for each in values if isinstance(each, Tensor)} - {number.device}
            if len(devices) == 1:
                options = {"dtype": number.dtype, "device": devices.pop()}
                with graph.graph.inserting_before(user):
                    moved = graph.graph.call_function(torch.ops.aten.full.default, ([], number.item()), options)
                user.replace_input_with(node, moved)
    graph.recompile()


def _state(part: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by one name for each layer that has them.

    Under two names of a layer ``functional_call`` would take what it was given for what it has to put back.
    """
    found = {}
    for path, layer in part.named_modules():
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None:
                found[f"{path}.{name}" if path else name] = tensor
    return found


class Traced(NamedTuple):
    """A part, traced for inputs of some sizes."""

    graph: TracedGraph
    others: Sequence[Any]
    """What else is returned, in a tuple each; None for tensors, which the graph returns."""
    form: Any
    written: Sequence[int]
    """Inputs that are changed in place, by index."""

    def compiled(self, shared: Compiled) -> Callable[..., Any]:
        """Compile it, or find it in Inductor's caches, unless it was compiled before."""
        if self.graph not in shared:
            shared[self.graph] = compile_graph(self.graph)
        compiled = shared[self.graph]

        def call(*given: Tensor) -> Any:
            found = iter(compiled(*given))
            return tree_unflatten([next(found) if one is None else one[0] for one in self.others], self.form)

        return call


#: Where graphs are to be compiled elsewhere first.
_hand_over: ContextVar[HandOver | None] = ContextVar("takes graphs", default=None)


@contextmanager
def handing_over(take: HandOver) -> Iterator[None]:
    """Let parts that would be compiled in this context be traced and given to ``take``, and run uncompiled."""
    token = _hand_over.set(take)
    try:
        yield
    finally:
        _hand_over.reset(token)


def is_all_known(part: fx.GraphModule) -> bool:
    """Return whether all layers and functions of a part are PyTorch's or ours, so that one trace holds for all values.

    One of the user's, a hook or a layer's own forward too, may branch on what is in a tensor, or on what it counts.
    """
    called = [part.get_submodule(str(node.target)) for node in part.graph.nodes if node.op == "call_module"]
    functions = [node.target for node in part.graph.nodes if node.op == "call_function"]
    users = any(runs_users_code(layer) for each in called for layer in each.modules())
    return not users and all(map(is_known, functions)) and not any(map(_asks_for_memory, part.graph.nodes))


#: Methods, functions and attributes that tell where numbers lie, or take them from there: views that a part is given
#: are traced as beginning where their memory does.
_OF_MEMORY = {"as_strided", "as_strided_", "data", "data_ptr", "storage", "storage_offset", "untyped_storage"}


def _asks_for_memory(node: fx.Node) -> bool:
    if node.op not in ("call_method", "call_function"):
        return False
    name = node.args[1] if node.target is getattr else node.target
    return (name if isinstance(name, str) else getattr(name, "__name__", "")) in _OF_MEMORY
