"""``Flow``: what one forward of a model tells of where heads may stand: its main path, and its work."""

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from .batches import Batch
from .recorder import record
from .recording import Call, Operation, Value, ancestors

#: Operators of a token each, or of the features of one: what they make of the first token depends on that alone.
_PER_TOKEN = frozenset("clone _to_copy native_layer_norm native_dropout alias detach expand".split())


class Flow:
    """One forward of a model in eval mode, and the questions that its recording answers."""

    def __init__(self, model: nn.Module, example: Batch) -> None:
        """Run the model once, without gradients; it is not changed.

        Under the watch of host reads nn.MultiheadAttention takes its parts one by one, in place of an operator of which
        nobody can tell the FLOPs, and that exists on some devices alone.

        Args:
            model: any module.
            example: two samples for it; tensors on the device ``meta`` do.
        """
        self._recording = record(model, example, evaluating=True, watch_host=True)
        self._model = model
        runs = Counter(call.layer for call in self._recording.calls)
        self._ends = {call.name: call for call in self._recording.calls if call.name and runs[call.layer] == 1}
        self._roots: dict[Value, Value] = {}

    @property
    def output(self) -> Any:
        """What the model returned for two samples."""
        return self._recording.output

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what layers return for two samples that run once and return one tensor that heads can read."""
        ends = ((name, self._readable(call)) for name, call in self._ends.items())
        return {name: value.shape for name, value in ends if value is not None}

    def listened(self) -> list[str]:
        """Return the layers that run once and return a tensor that heads can read, or several things."""
        readable = self.shapes
        return [name for name, call in self._ends.items() if name in readable or len(call.returned) > 1]

    @property
    def first_token_of(self) -> frozenset[int]:
        """Numbers of tokens T of which the model itself reads the first alone."""
        picks = (each for each in self._recording.operations if each.name == "select" and len(each.reads[0].shape) == 3)
        return frozenset(each.reads[0].shape[1] for each in picks if tuple(each.args[1:]) in ((1, 0), (-2, 0)))

    def first_token_is_constant(self, layer: str) -> bool:
        """Return whether nothing of the input has reached the first token of what a layer returns."""
        value = self._readable(self._ends[layer])
        return value is not None and len(value.shape) == 3 and not _first_token_depends(value)

    def work_at(self, layers: Sequence[str]) -> list[float]:
        """Return how far the model is, from 0 to 1, when each of some layers returns that run once.

        FLOPs are those of convolutions, products and attention: the same on every device and in every dtype, whatever
        kernels run there, but for attention of CUDA devices that pads heads whose width is no multiple of 8. Of a model
        without any, operators are counted.
        """
        work = [each.flops for each in self._recording.operations]
        if not any(work):
            work = [not each.is_view for each in self._recording.operations]
        return [sum(work[: self._ends[layer].ended]) / sum(work) for layer in layers]

    def cuts(self) -> list[str]:
        """Return the layers through whose output alone all that comes later depends on the input, as they run.

        Such a layer lies on the main path, and runs once; one inside of a residual branch does not: the sum behind it
        reads what went past the branch, too. Of layers that return the very same tensor it is one that lies in the
        fewest others.
        """
        last_read, born = self._lives()
        found: dict[Value, str] = {}
        for name, call in self._ends.items():
            value = self._readable(call)
            if value is None or value.written is not None or not value.from_input or call.layer is self._model:
                continue
            root = self._root(value)
            alive = [each for each, read in last_read.items() if born[each] < call.ended <= read]
            if alive == [root] and prod(root.shape) == prod(value.shape):
                if root not in found or name.count(".") < found[root].count("."):
                    found[root] = name
        return sorted(found.values(), key=list(self._ends).index)

    def _readable(self, call: Call) -> Value | None:
        """Return what a layer returned, if that is one tensor that a head can read."""
        value = call.returned.get(())
        return value if value is not None and value.feeds_head(self._recording.samples) else None

    def _lives(self) -> tuple[dict[Value, int], dict[Value, int]]:
        """Return, of values that the output depends on, the last operation to read each, and the one that makes it."""
        returned = [value for value in self._recording.returned.values() if value.from_input]
        needed: set[Operation] = set().union(*map(ancestors, returned))
        last_read = {self._root(value): len(self._recording.operations) for value in returned}
        for operation in sorted(needed, key=lambda each: -each.number):
            for read in operation.reads:
                if read.from_input:
                    last_read.setdefault(self._root(read), operation.number)
        return last_read, {each: -1 if each.made_by is None else each.made_by.number for each in last_read}

    def _root(self, value: Value) -> Value:
        """Return the value that one is a view of."""
        made_by = value.made_by
        if made_by is None or not made_by.is_view:
            return value
        if value not in self._roots:
            self._roots[value] = self._root(made_by.reads[0])
        return self._roots[value]


def _first_token_depends(value: Value) -> bool:
    made_by = value.made_by
    if made_by is None or not value.from_input:
        return value.from_input
    pieces = made_by.reads
    if made_by.name == "cat" and len(value.shape) == 3 and made_by.args[1:] in ((1,), (-2,)):
        pieces = made_by.reads[:1]
    elif not (torch.Tag.pointwise in getattr(made_by.function, "tags", ()) or made_by.name in _PER_TOKEN):
        return True
    return any(len(each.shape) == 3 and _first_token_depends(each) for each in pieces)
