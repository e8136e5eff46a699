"""``BackboneRewriter``: a copy of a backbone whose traceable parts are rewritten, and whose taps are all in place."""

from collections import Counter
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.utils.fuser_utils import erase_nodes, fuse_as_graphmodule, insert_subgm

from ..heads.fused_aux_head import FusedAuxHead
from ..listening.kept import shallow_copy
from .branches import Step, has_branches, holds_tap, plan_branches
from .compiled_part import Compiled, CompiledPart, is_all_known
from .fused_convolution import FusedConvolution
from .fused_linear import FusedLinear
from .graph_passes import (
    drop_no_ops,
    fuse_what_follows,
    pad_first_convolutions,
    replace_convolutions,
    replace_linears,
    replace_max_pools,
    replace_norms,
    take_off_classifier,
)
from .in_place import changed_in_place, changed_in_some_layouts
from .inductor import OPTIONS
from .layer_graph import LayerGraph, constants_of, is_users, runs_on_one_tensor, trace
from .pieces import pieces_of
from .self_attention import replace_attentions, replace_self_attentions, replace_window_attentions


class BackboneRewriter:
    """Makes one rewritten copy of a backbone, which shares its parameters.

    The forward is traced into a graph in which every tap is a module under its own name. What cannot be traced stays as
    it is, down to its own layers, which are traced one by one.
    """

    def __init__(self, backbone: nn.Module, taps: Sequence[str], example_input: Tensor, *, compiles: bool) -> None:
        """Copy ``backbone``; the example shows which layers may be rewritten one by one.

        :meth:`compile` is to follow, where it ``compiles``, once the convolutions have chosen how they run.
        """
        self._source_of: dict[nn.Module, nn.Module] = {}
        self._root = shallow_copy(backbone, self._source_of)
        self._taps = {self._root.get_submodule(tap): tap for tap in taps}
        self._example = example_input
        self._alone: set[nn.Module] | None = None
        self._compiles = compiles
        self._changed: str | None = None  # by a node, in place
        self.depends_on_layout: str | None = None
        """A node that changes in place what others read only if maps lie as they do, or only if they do not."""
        self._parts: list[tuple[fx.GraphModule, str]] = []
        self._untraced: list[nn.Module] = []
        self._classifier: FusedAuxHead | None = None
        self.stems: list[FusedConvolution] = []
        """The convolutions that read an input of more channels than the backbone has, if there are some."""
        self.constants: list[Tensor] = []
        """What forwards made while they were traced: made once, it would hold what all calls have written to it."""
        self._notes: list[str] = []
        self._counts: Counter[str] = Counter()

    def rewritten(self) -> tuple[nn.Module, FusedAuxHead | None, list[str]]:
        """The copy with fused convolutions and Triton's max-pools; its classifier, if it was taken off; and notes.

        Where it compiles, max-pools are left to the compiler.
        """
        module = self._rewritten(self._root, "")
        norms, sums, pools, attentions, parts = (
            _counted(self._counts, each) for each in ("batch norm", "sum", "max-pool", "self-attention", "part")
        )
        done = [f"Folded or fused into convolutions: {norms} and {sums}; {pools} replaced by a Triton kernel."]
        if self._compiles:
            done = [f"Compiled between the taps: {parts}, in which {norms} and {sums} are folded into convolutions."]
        if self._counts["self-attention"]:
            done.append(f"Attending without copies: {attentions}.")
        return module, self._classifier, [*done, *self._notes]

    def branches(self, module: nn.Module) -> list[Step] | str:
        """Return the plan to run branches of the copy side by side; or why there is none."""
        if not isinstance(module, fx.GraphModule):
            return "the forward of the backbone could not be traced"
        if self._changed is not None:
            return f"{self._changed} may change in place what others read"
        layers = LayerGraph(module.graph, module, {})
        users = {node for node in module.graph.nodes if is_users(layers, node)}
        steps = plan_branches(module.graph, self._taps.values(), users)
        return steps if has_branches(steps) else "no layers run beside each other"

    def compile(self) -> None:
        """Have what lies between the taps compiled when it first runs; hooks on taps stay outside, in eager code.

        What could not be traced Dynamo traces, as far as it can.
        """
        untraced = [*self._untraced]
        compiled: Compiled = {}
        for owner, name in self._parts:
            part = owner.get_submodule(name)
            assert isinstance(part, fx.GraphModule)
            if is_all_known(part):
                setattr(owner, name, CompiledPart(part, compiled, begins_early=True))
            else:
                untraced.append(part)
        for module in untraced:
            module.forward = torch.compile(module.forward, dynamic=False, options=OPTIONS)

    def _rewritten(self, module: nn.Module, path: str) -> nn.Module:
        begins = f"{path}." if path else ""
        taps = {layer: self._taps[layer].removeprefix(begins) for layer in module.modules() if layer in self._taps}
        taps.pop(module, None)  # its own hooks fire where it is called
        traced = trace(module, taps)
        if isinstance(traced, str) and self._compiles and not taps:
            self._untraced.append(module)
            self._counts["part"] += 1
            return module
        if isinstance(traced, str):
            what = f"The layer {path!r} ({type(module).__name__})" if path else "The forward of the backbone"
            self._notes.append(f"{what} runs as it is: {traced}.")
            self._rewrite_children(module, path)
            return module
        graph, kept = traced
        self.constants += constants_of(graph, module)
        for name, reason in kept.items():
            layer = module.get_submodule(name)
            if self._compiles and self._taps.keys().isdisjoint(layer.modules()):
                continue  # the compiler takes it in its own way
            self._notes.append(f"The layer {begins + name!r} ({type(layer).__name__}) runs as it is: {reason}.")
            self._rewrite_children(layer, begins + name)
        layers = LayerGraph(graph, module, self._source_of)
        self._fuse(layers, is_backbone=not path)
        self._changed = changed_in_place(layers)
        self.depends_on_layout = self.depends_on_layout or changed_in_some_layouts(layers)
        graph_module = layers.assemble()
        if self._compiles:
            self._part_between(graph_module, list(taps.values()))
        return graph_module

    def _rewrite_children(self, module: nn.Module, path: str) -> None:
        """Rewrite the layers of a module whose own forward stays, as far as it calls them with one tensor."""
        if self._alone is None:  # found while all layers are still what they were
            self._alone = runs_on_one_tensor(self._root, self._example)
        for name, child in list(module.named_children()):
            child_path = f"{path}.{name}" if path else name
            if isinstance(child, torch.jit.ScriptModule):
                continue
            if child not in self._alone:  # a list of layers, say, which the module may index
                self._rewrite_children(child, child_path)
            elif next(child.children(), None) is not None:
                setattr(module, name, self._rewritten(child, child_path))

    def _fuse(self, layers: LayerGraph, *, is_backbone: bool) -> None:
        drop_no_ops(layers)
        self._notes += replace_convolutions(layers)
        if not self._compiles:  # a compiler makes one launch of a norm and what is before and behind it
            replace_norms(layers)
        fuse_what_follows(layers)
        self._counts["self-attention"] += replace_self_attentions(layers) + replace_window_attentions(layers)
        self._counts["self-attention"] += replace_attentions(layers, begins_early=self._compiles)
        if not self._compiles:
            self._counts["max-pool"] += replace_max_pools(layers)
        for node in layers.graph.nodes:
            layer = layers.layer(node)
            if isinstance(layer, FusedConvolution):
                self._counts["batch norm"] += layer.folds_norm and not layer.scales
                self._counts["sum"] += len(node.args) == 2
        if is_backbone:
            self.stems = pad_first_convolutions(layers)
            classifier = take_off_classifier(layers)
            if isinstance(classifier, str):
                self._notes.append(f"The classifier stays in the trunk: {classifier}.")
            else:
                self._classifier = classifier
        replace_linears(layers)
        for new in layers.new.values():
            for layer in new.modules():
                if isinstance(layer, (FusedConvolution, FusedLinear)):
                    layer.compiled = self._compiles

    def _part_between(self, graph_module: fx.GraphModule, taps: Sequence[str]) -> None:
        """Make modules of what lies between the nodes that are, or hold, taps: those, and their hooks, run eagerly."""
        parts: list[dict[fx.Node, int | None]] = [{}]
        for node in graph_module.graph.nodes:
            if holds_tap(node, taps) or node.op in ("placeholder", "output"):
                parts.append({})
            else:
                parts[-1][node] = None
        computing = [part for part in parts if any(node.op != "get_attr" for node in part)]
        pieces = [dict.fromkeys(piece) for piece in pieces_of(graph_module, [list(part) for part in computing])]
        names = (name for name in map("segment_{}".format, count()) if not hasattr(graph_module, name))
        for piece in pieces:
            if all(user in piece for node in piece for user in node.users):
                continue  # nothing is left of it but what it changes in place, if that: a part has to return something
            # In the order that they have, which fuse_by_partitions would change: some change in place what others read.
            nodes, name = [*piece], next(names)
            fused, inputs, outputs = fuse_as_graphmodule(graph_module, nodes, name, piece)
            insert_subgm(graph_module, fused, inputs, outputs)
            erase_nodes(graph_module, nodes)
            self._parts.append((graph_module, name))
            self._counts["part"] += 1
        graph_module.graph.lint()
        graph_module.recompile()


def whole(backbone: nn.Module) -> CompiledPart | None:
    """Return a backbone as it is, as one part to compile; None where one trace does not hold for all batches."""
    root = shallow_copy(backbone, {})
    traced = trace(root, {})
    if isinstance(traced, str) or traced[1]:
        return None
    module = LayerGraph(traced[0], root, {}).assemble()
    return CompiledPart(module) if is_all_known(module) else None


def _counted(counts: Counter[str], what: str) -> str:
    return f"{counts[what]} {what}" + ("" if counts[what] == 1 else "s")
