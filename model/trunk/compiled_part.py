"""``CompiledPart``: a part of a traced backbone that Inductor compiles, without Dynamo, which would trace it again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

#: The runner captures the graphs.
OPTIONS: dict[str, Any] = {"triton.cudagraphs": False}
#: Sizes, layouts and types that a part is compiled for, each of which takes seconds; further ones run uncompiled.
MOST_KINDS = 8
#: Where layers and functions are from that depend on nothing but their input and parameters.
_KNOWN = ("torch", "torchvision", "_operator", "builtins", "math", __package__.partition(".")[0])


class CompiledPart(nn.Module):
    """Runs a graph of layers, compiled at the first call with inputs of new sizes, memory layouts or types.

    Of an EfficientNet Dynamo takes 1.5 s to trace what is a graph already, and this 0.15 s: in each process, since no
    cache keeps a trace.
    """

    def __init__(self, part: fx.GraphModule) -> None:
        """Compile ``part``, which is run without gradients."""
        super().__init__()
        self.part = part
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def forward(self, *inputs: Any) -> Any:
        """Run for inputs as ``part`` takes them."""
        state = dict((*self.part.named_parameters(), *self.part.named_buffers()))
        leaves, form = tree_flatten(inputs)
        kind = (str(form), *(_kind(each) for each in (*state.values(), *leaves)))
        tensors = [each.detach() for each in (*state.values(), *leaves) if isinstance(each, Tensor)]
        if kind not in self._compiled and len(self._compiled) == MOST_KINDS:
            return self.part(*inputs)
        if kind not in self._compiled:
            with torch.inference_mode(False), torch.no_grad():
                self._compiled[kind] = self._compile(list(state), leaves, form, tensors)
        return self._compiled[kind](*tensors)

    def _compile(
        self, names: Sequence[str], leaves: Sequence[Any], form: Any, tensors: Sequence[Tensor]
    ) -> Callable[..., Any]:
        from torch._guards import TracingContext, tracing
        from torch._inductor import compile as inductor  # takes a second
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        returned: list[Any] = []  # all that is returned, in which tensors stand for themselves, and its form

        def run(*given: Tensor) -> list[Tensor]:
            state, rest = dict(zip(names, given, strict=False)), iter(given[len(names) :])
            inputs = tree_unflatten([next(rest) if isinstance(each, Tensor) else each for each in leaves], form)
            returned[:] = tree_flatten(functional_call(self.part, state, inputs))
            return [each for each in returned[0] if isinstance(each, Tensor)]

        # As Dynamo hands graphs over: without an environment of shapes Inductor's caches are not used.
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        fakes: list[Any] = [mode.from_tensor(each, static_shapes=True) for each in tensors]
        graph = make_fx(run, tracing_mode="real")(*fakes)
        with tracing(TracingContext(mode)):
            compiled = inductor(graph, fakes, options=OPTIONS)
        others, returned_form = [None if isinstance(each, Tensor) else (each,) for each in returned[0]], returned[1]

        def call(*given: Tensor) -> Any:
            found = iter(compiled(*given))
            return tree_unflatten([next(found) if one is None else one[0] for one in others], returned_form)

        return call


def is_known(part: fx.GraphModule) -> bool:
    """Return whether all layers and functions of a part are PyTorch's or ours, so that one trace holds for all values.

    One of the user's may branch on what is in a tensor, or on what it counts.
    """
    called = [part.get_submodule(str(node.target)) for node in part.graph.nodes if node.op == "call_module"]
    kinds: list[Any] = [type(layer) for each in called for layer in each.modules()]
    kinds += [node.target for node in part.graph.nodes if node.op == "call_function"]
    return all((getattr(kind, "__module__", None) or "torch").partition(".")[0] in _KNOWN for kind in kinds)


def _kind(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value
