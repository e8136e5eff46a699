"""``watch_forward``: the layers whose output is all that a model still uses of its input.

Such a layer lies on the model's main path. One inside of a residual branch does not: the sum behind it reads what went
past the branch, too.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..arguments import is_plain
from ..batches import Batch, call_with, first_tensor, map_tensors
from ..dry_run import is_readable, written_tensors
from ..hooks import ThreadHook


class ForwardFlow(NamedTuple):
    """One forward of a model, as far as heads need to know of it."""

    cuts: list[str]
    """Layers that run once and through whose output alone all that comes later depends on the input, in the order in
    which they run; of layers that return the very same tensor one that lies in the fewest others."""
    shapes: dict[str, tuple[int, ...]]
    """Of what layers return for two samples that run once and return one tensor."""
    output: Any
    """What the model returned for two samples."""
    first_token_of: frozenset[int]
    """Numbers of tokens T of which the model itself reads the first alone."""


def watch_forward(model: nn.Module, example: Batch) -> ForwardFlow:
    """Run a model once in eval mode, without gradients, and find the layers that may carry a head.

    Every operator is watched. A layer's output is a cut if no tensor that depends on the input and was there when the
    layer returned, but that output, is read any more on the way to what the model returns.

    Args:
        model: any module; not changed.
        example: two samples for it; tensors on the device ``meta`` do.
    """
    flow = _Flow(example)
    with ExitStack() as stack:
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_hook(ThreadHook(flow.end)).remove)
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(flow)
        output = call_with(model, flow.x)
    return flow.found(model, output)


class _End(NamedTuple):
    """The end of a layer's call."""

    layer: nn.Module
    value: int
    """Its output."""
    steps: int
    """Operators that had run."""
    output: Tensor


class _Flow(TorchDispatchMode):
    """Follows what depends on the input. A value is what lies in some memory, until that is written to again."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled layers run compiled."""
        return True

    def __init__(self, example: Batch) -> None:
        super().__init__()
        self.x = map_tensors(example, torch.clone)  # which the model may change in place
        self._samples = first_tensor(example).shape[0]
        self.first_token_of: set[int] = set()
        self._kept: list[Any] = []  # memory that was freed could be taken for what lay there before
        self._value_in: dict[int, int] = {}
        self._born: list[int] = []  # of each value, the number of the step that made it
        self._steps: list[tuple[set[int], set[int]]] = []  # values read, values made
        self._ends: list[_End] = []
        self._runs: Counter[nn.Module] = Counter()
        for each in tree_leaves(self.x if isinstance(self.x, (Tensor, tuple)) else dict(self.x)):
            if is_plain(each):
                self._make(each)

    def end(self, layer: nn.Module, _inputs: Any, output: Any) -> None:
        """Note that a layer returns: the forward hook."""
        self._runs[layer] += 1
        if is_readable(output, self._samples) and (value := self._value(output)) is not None:
            self._ends.append(_End(layer, value, len(self._steps), output))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it reads and makes of what depends on the input."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        read = {value for each in tree_leaves((args, kwargs)) if (value := self._value(each)) is not None}
        if read:
            made = {self._make(tensor) for tensor in written_tensors(func, args, kwargs)}
            made |= {self._make(each) for each in tree_leaves(output) if is_plain(each) and self._value(each) is None}
            if made:  # and not a view alone
                self._steps.append((read, made))
            if func is torch.ops.aten.select.int and args[0].ndim == 3 and args[1:] in ((1, 0), (-2, 0)):
                self.first_token_of.add(args[0].shape[1])
        return output

    def _value(self, tensor: Any) -> int | None:
        return self._value_in.get(tensor.untyped_storage()._cdata) if is_plain(tensor) else None

    def _make(self, tensor: Tensor) -> int:
        memory = tensor.untyped_storage()
        self._kept.append(memory)
        value = self._value_in[memory._cdata] = len(self._born)
        self._born.append(len(self._steps))
        return value

    def found(self, model: nn.Module, output: Any) -> ForwardFlow:
        """Return what was found, once all has run."""
        last_read = self._last_reads(output)
        names = _shortest_names(model)
        ends = {names[end.layer]: end for end in self._ends if end.layer in names and self._runs[end.layer] == 1}
        cuts: dict[int, str] = {}
        for name, end in ends.items():
            other = cuts.get(end.value)
            if end.layer is not model and self._is_cut(end, last_read):
                if other is None or name.count(".") < other.count("."):
                    cuts[end.value] = name
        return ForwardFlow(
            sorted(cuts.values(), key=list(ends).index),
            {name: tuple(end.output.shape) for name, end in ends.items()},
            output,
            frozenset(self.first_token_of),
        )

    def _last_reads(self, output: Any) -> dict[int, int]:
        """Return, for each value that the output depends on, the number of the last step that reads it for that."""
        last: dict[int, int] = {}
        for each in tree_leaves(output):
            if (value := self._value(each)) is not None:
                last[value] = len(self._steps)
        for step in range(len(self._steps) - 1, -1, -1):
            read, made = self._steps[step]
            if not last.keys().isdisjoint(made):
                for value in read:
                    last.setdefault(value, step)
        return last

    def _is_cut(self, end: _End, last_read: Mapping[int, int]) -> bool:
        if self._value(end.output) != end.value:
            return False  # changed in place later
        if end.output.numel() * end.output.itemsize != end.output.untyped_storage().nbytes():
            return False  # a part of what is there
        alive = [value for value, read in last_read.items() if self._born[value] < end.steps <= read]
        return alive == [end.value]


def _shortest_names(model: nn.Module) -> Mapping[nn.Module, str]:
    names: dict[nn.Module, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if layer not in names or name.count(".") < names[layer].count("."):
            names[layer] = name
    return names
