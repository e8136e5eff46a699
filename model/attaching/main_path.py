"""``find_cuts``: the layers whose output is all that a model still uses of its input, and the work done by then.

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
from torch.utils.flop_counter import flop_registry

from ..arguments import is_plain
from ..dry_run import is_readable, written_tensors
from ..hooks import ThreadHook


class Cut(NamedTuple):
    """A layer that runs once and through whose output alone all that comes later depends on the input."""

    name: str
    """Of layers that return the very same tensor one that lies in the fewest others, the first of these."""
    shape: tuple[int, ...]
    """Of its output, for two samples."""
    work: float
    """Done when it returns, as a share of the model's: 0 to 1."""


class Cuts(NamedTuple):
    """One forward of a model, as far as heads need to know of it."""

    cuts: list[Cut]
    """In the order in which they run."""
    output: Any
    """What the model returned for two samples."""
    first_token_of: frozenset[int]
    """Numbers of tokens T of which the model itself reads the first alone."""


def find_cuts(model: nn.Module, example: Tensor) -> Cuts:
    """Run a model once in eval mode, without gradients, and find the layers that may carry a head.

    Every operator is watched. A layer's output is a cut if no tensor that depends on the input and was there when the
    layer returned, but that output, is read any more on the way to what the model returns. Work is counted in FLOPs
    of products and convolutions, and one more for each operator.

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
        output = model(flow.x)
    return Cuts(flow.cuts(model, output), output, frozenset(flow.first_token_of))


class _End(NamedTuple):
    """The end of a layer's call."""

    layer: nn.Module
    value: int
    """Its output."""
    steps: int
    """Operators that had run."""
    work: float
    output: Tensor


class _Flow(TorchDispatchMode):
    """Follows what depends on the input. A value is what lies in some memory, until that is written to again."""

    def __init__(self, example: Tensor) -> None:
        super().__init__()
        self.x = example.clone(memory_format=torch.preserve_format)  # which the model may change in place
        self._flops = 0
        self.first_token_of: set[int] = set()
        self._kept: list[Any] = []  # memory that was freed could be taken for what lay there before
        self._value_in: dict[int, int] = {}
        self._born: list[int] = []  # of each value, the number of the step that made it
        self._steps: list[tuple[set[int], set[int]]] = []  # values read, values made
        self._ends: list[_End] = []
        self._runs: Counter[nn.Module] = Counter()
        self._make(self.x)

    def end(self, layer: nn.Module, _inputs: Any, output: Any) -> None:
        """Note that a layer returns: the forward hook."""
        self._runs[layer] += 1
        if is_readable(output, len(self.x)) and (value := self._value(output)) is not None:
            whole = output.numel() * output.itemsize == output.untyped_storage().nbytes()
            if whole:
                self._ends.append(_End(layer, value, len(self._steps), self._work(), output))

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it reads and makes of what depends on the input."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        # FlopCounterMode itself hooks modules for gradients, which fails on parameters that a layer takes as input.
        if (count := flop_registry.get(getattr(func, "overloadpacket", None))) is not None:
            self._flops += count(*args, **kwargs, out_val=output)
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

    def _work(self) -> float:
        return self._flops + len(self._steps)

    def cuts(self, model: nn.Module, output: Any) -> list[Cut]:
        """Return the cuts, once all has run."""
        needed = {value for each in tree_leaves(output) if (value := self._value(each)) is not None}
        last_read: dict[int, int] = dict.fromkeys(needed, len(self._steps))
        for step in range(len(self._steps) - 1, -1, -1):
            read, made = self._steps[step]
            if made & needed:
                needed |= read
                for value in read:
                    last_read.setdefault(value, step)
        names = _shortest_names(model)
        total = self._work()
        found: dict[int, Cut] = {}
        for end in self._ends:
            if end.layer is model or end.layer not in names or self._runs[end.layer] != 1:
                continue
            if self._value(end.output) != end.value:
                continue  # changed in place later
            alive = [
                value for value, read in last_read.items() if self._born[value] < end.steps and read >= end.steps
            ]
            if alive == [end.value]:
                cut, other = Cut(names[end.layer], tuple(end.output.shape), end.work / total), found.get(end.value)
                if other is None or cut.name.count(".") < other.name.count("."):
                    found[end.value] = cut
        return list(found.values())


def _shortest_names(model: nn.Module) -> Mapping[nn.Module, str]:
    names: dict[nn.Module, str] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if layer not in names or name.count(".") < names[layer].count("."):
            names[layer] = name
    return names
