"""The logits of all exits as one program of ``torch.export``, for a batch of any size, whole or cut into stages."""

import logging
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from ..basics.bad_input import BadInput
from ..listening.batches import Batch, first_tensor, map_tensors, tensors_by_name
from ..network.early_exit_network import EarlyExitNetwork
from ..training.learners import AllExits


class Stage(NamedTuple):
    """A part of a network that ends with the logits of an exit."""

    module: fx.GraphModule
    """Takes ``takes`` and returns a tuple: the logits of its exit, and ``hands``."""
    takes: tuple[Tensor, ...]
    """Fake tensors, with the shape and dtype of what it takes; sizes that depend on the batch are symbols."""
    hands: tuple[Tensor, ...]
    """The same of what it hands to the next stage."""
    logits: Tensor
    """The same of its exit's logits."""


def cut_into_stages(whole: fx.GraphModule) -> list[Stage]:
    """Cut a graph at its exits: the stage of a node is that of the first exit whose logits depend on it.

    Between two stages are handed over the values that a later stage reads, and no others. What does not depend on the
    input, such as a parameter or a size, is in every stage that reads it.

    ``whole`` is of ``ExportedProgram.module()``, without operators that write to their arguments; it takes a batch and
    returns the logits of each exit, in the order in which they run. ``BadInput`` if a stage needs a size that nothing
    that it takes has.
    """
    nodes = list(whole.graph.nodes)
    exits: list[fx.Node] = list(whole.graph.output_node().args[0])  # type: ignore[arg-type]
    stage_of = _stages(nodes, exits)
    last_use = {node: exit_index for exit_index, node in enumerate(exits)}
    for node, stage in stage_of.items():
        for used in node.all_input_nodes:
            last_use[used] = max(stage, last_use.get(used, 0))
    takes = [node for node in nodes if node.op == "placeholder"]
    stages = []
    for index, logits in enumerate(exits):
        hands = [node for node in nodes if node in stage_of and stage_of[node] <= index < last_use.get(node, 0)]
        hands = [node for node in hands if isinstance(_value(node), Tensor)]  # not the tuple that they are taken of
        own = [node for node in nodes if stage_of.get(node) == index and node.op != "placeholder"]
        module = _Copy(whole, takes).module(own, [logits, *hands])
        stages.append(Stage(module, tuple(map(_value, takes)), tuple(map(_value, hands)), _value(logits)))
        takes = hands
    return stages


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _stages(nodes: Sequence[fx.Node], exits: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Return the stage of each node that the logits depend on and that depends on the input's values."""
    of_input: set[fx.Node] = set()
    for node in nodes:
        sized = isinstance(_value(node), (torch.SymInt, torch.SymFloat, torch.SymBool))
        if node.op == "placeholder" or not sized and any(used in of_input for used in node.all_input_nodes):
            of_input.add(node)
    stage_of: dict[fx.Node, int] = {}
    for index, logits in enumerate(exits):
        ahead = [logits]
        while ahead:
            node = ahead.pop()
            if node in of_input and node not in stage_of:
                stage_of[node] = index
                ahead += node.all_input_nodes
    for node in nodes:
        if node.op == "placeholder" and node in stage_of:  # given to the first, who hands on what later ones read
            stage_of[node] = 0
        if node.target is operator.getitem and node in stage_of:  # a tuple is not handed over: its items are
            stage_of[node] = stage_of[node.all_input_nodes[0]]
    return stage_of


class _Copy:
    """Copies nodes of one graph into another, which takes some values and returns others."""

    def __init__(self, whole: fx.GraphModule, takes: Sequence[fx.Node]) -> None:
        self._whole = whole
        self._takes = takes
        self._graph = fx.Graph()
        self._copies = {node: self._graph.placeholder(f"taken_{index}") for index, node in enumerate(takes)}

    def module(self, own: Sequence[fx.Node], returns: Sequence[fx.Node]) -> fx.GraphModule:
        """Return the module that computes ``own``, in this order, and returns a tuple."""
        for node in own:
            self._copies[node] = self._graph.node_copy(node, self._copy)
        self._graph.output(tuple(self._copies[node] for node in returns))
        return fx.GraphModule(self._whole, self._graph)

    def _copy(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node, or make it of one that depends on no value of the input."""
        if node not in self._copies:
            size = self._size(node) if isinstance(_value(node), torch.SymInt) else None
            self._copies[node] = self._graph.node_copy(node, self._copy) if size is None else size
        return self._copies[node]

    def _size(self, node: fx.Node) -> fx.Node | None:
        """Return a size as that of a value that is taken; None if it is computed of others."""
        wanted = _value(node).node.expr
        for taken in self._takes:
            for dim, size in enumerate(_value(taken).shape):
                if isinstance(size, torch.SymInt) and size.node.expr == wanted:
                    return self._graph.call_function(torch.ops.aten.sym_size.int, (self._copies[taken], dim))
        if node.target is torch.ops.aten.sym_size.int:
            raise BadInput(f"network: a stage needs the size {wanted}, which nothing that is handed to it has")
        return None


class _OfTensors(nn.Module):
    """The logits of all exits, given the tensors of a batch one by one; what else is in it stays as it is."""

    def __init__(self, network: EarlyExitNetwork, example: Batch) -> None:
        super().__init__()
        self.network = AllExits(network)
        self._example = example

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        return self.network(map_tensors(self._example, lambda _: next(left)))


def logits_program(network: EarlyExitNetwork, example: Batch) -> ExportedProgram:
    """Return the program of a network's logits, whose operators write to nothing that others read.

    It takes the tensors of a batch like the example, of any size; of one sample it is made for one alone.
    ``BadInput`` if torch.export cannot make it, or the backbone keeps a state, which files would not.
    """
    tensors, samples = tuple(tensors_by_name(example).values()), len(first_tensor(example))
    with one_line_of_exporter("network: torch.export cannot export it"):
        batch = None if samples == 1 else {0: Dim.DYNAMIC}
        shapes = (tuple(batch if each.ndim and len(each) == samples else None for each in tensors),)
        program = torch.export.export(_OfTensors(network, example), tensors, dynamic_shapes=shapes)
        program = program.run_decompositions({})  # into operators without side effects, and no further
    written = sorted(
        name.removeprefix("network.network.") for name in program.graph_signature.buffers_to_mutate.values()
    )
    if written:
        raise BadInput(f"network: a forward writes to {written[0]!r}, wants none that does: files keep no state")
    return program


def stage_program(stage: Stage, handed: tuple[Tensor, ...]) -> ExportedProgram:
    """Return the program of a stage, given what the stages before hand to it for a batch of two samples or more."""
    batch = Dim("batch")
    shapes = tuple(
        {dim: _of_batch(size, batch) for dim, size in enumerate(each.shape) if isinstance(size, torch.SymInt)}
        for each in stage.takes
    )
    with one_line_of_exporter("network: torch.export cannot export a stage of it"):
        return torch.export.export(stage.module, handed, dynamic_shapes=shapes)


def _of_batch(size: Any, batch: Any) -> Any:
    """Return a multiple of the batch size as such: export would want two samples, told nothing of it."""
    times, rest = size.node.expr.as_coeff_Mul()
    return int(times) * batch if rest.is_Symbol and times.is_Integer else Dim.AUTO


#: Warns of each constant that a branch returns.
_DEDUPLICATION = logging.getLogger("onnx_ir.passes.common.initializer_deduplication")


@contextmanager
def quietly() -> Iterator[None]:
    """Keep to itself what exporters warn of: how they use PyTorch, and what they leave as it is."""
    level = _DEDUPLICATION.level
    _DEDUPLICATION.setLevel(logging.ERROR)
    try:
        with _without_warnings_of_pytorch():
            yield
    finally:
        _DEDUPLICATION.setLevel(level)


@contextmanager
def _without_warnings_of_pytorch() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        warnings.filterwarnings("ignore", "No complete tensor found in the group")  # said of channels_last weights
        yield


@contextmanager
def one_line_of_exporter(what: str) -> Iterator[None]:
    """Turn whatever PyTorch or ONNX raises into ``BadInput``, which says what it said."""
    with quietly(), torch.no_grad():
        try:
            yield
        except Exception as error:  # of many kinds
            if isinstance(error, OSError) and error.errno is not None:  # no space: nothing that an exporter cannot do
                raise
            raise BadInput(f"{what}: {type(error).__name__}: {' '.join(str(error).split()):.300}") from error
