"""``Segments``: a model's forward from tap to tap, where it may be cut, by what one recorded forward has read."""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..basics.bad_input import BadInput
from .batches import two_samples
from .between import Between, Handed
from .hooks import hooks_of, users_hooks
from .reading import Reading
from .recorder import record
from .recording import Call, Operation, Recording, Value

#: What outlives a forward, of which a device has its own.
_STATE = ("parameter", "buffer", "attribute")


class State(NamedTuple):
    """A parameter or a buffer of a backbone."""

    name: str
    tensor: Tensor
    segments: frozenset[int]
    """Those that read it, or of one that none reads, one that reads others of the same layer."""


class Segments:
    """A model's segments, which end at taps at which parts of it may end, the last one with the model: what each reads.

    All of it follows from the operations of one forward for two samples in eval mode.
    """

    def __init__(self, model: nn.Module, taps: Sequence[str], example: Tensor, reading: Reading | None) -> None:
        """Record the forward of a model, on the device of an example, with taps that were checked.

        Raises:
            BadInput: it keeps a state, or the host reads a number in it, on which what follows may depend.
        """
        self._model, self._all_taps, self._reading, self._example = model, taps, reading, example.detach()
        for name, layer in model.named_modules():
            if isinstance(layer, torch.jit.ScriptModule) and next(iter(layer.state_dict()), None) is not None:
                raise BadInput(f"network: its {name!r} is a ScriptModule with parameters, wants layers of Python")
        recording = record(model, two_samples(example), lines=True)
        for operation in recording.operations:
            if operation.changes:
                name = operation.changes[0].names[0]
                raise BadInput(f"network: a forward writes to {name!r}, wants none that does: parts keep no state")
        if recording.host_reads:
            where = recording.host_reads[0].line
            raise BadInput(f"network: its forward reads a number on the host at {where}; parts cannot: wants none")
        self.operations = _digest(recording)
        """Tells apart forwards by their operators and the numbers in them."""
        of_layer = {call.layer: call for call in recording.calls}
        calls = {tap: of_layer[model.get_submodule(tap)] for tap in taps}
        self.uncuttable: dict[str, str] = {}
        """Why no part may end at a tap, by tap; of all others the one tensor that it returns is all that goes on."""
        self._handed: dict[str, Handed] = {}
        for tap, call in calls.items():
            try:
                self._handed[tap] = Handed(recording.outputs[call.layer])
                if (why := _why_not(call, recording)) is not None:
                    del self._handed[tap]
                    self.uncuttable[tap] = why
            except ValueError as error:
                self.uncuttable[tap] = str(error)
        self.ends = [*self._handed]
        """The taps at which segments end, but for the last."""
        self._ended: dict[nn.Module, int] = {}
        """How many operations had run when the last call of each layer ended."""
        for call in recording.calls:
            self._ended[call.layer] = max(call.ended, self._ended.get(call.layer, 0))
        self.state = _state(model, recording, [calls[tap].ended for tap in self.ends])

    @property
    def segments(self) -> int:
        """How many there are."""
        return len(self.ends) + 1

    def read_by(self, start: int, end: int) -> list[State]:
        """Return what some consecutive segments read."""
        return [one for one in self.state if any(start <= segment < end for segment in one.segments)]

    def between(self, start: int, end: int, own: Mapping[int, Tensor]) -> Between:
        """Return the backbone's forward through consecutive segments; see :class:`Between`."""
        taps, reading, entered = self._all_taps, self._reading, None
        passed: set[nn.Module] = set()
        if start > 0:
            tap = self.ends[start - 1]
            at = self._ended[self._model.get_submodule(tap)]
            passed = {layer for layer, ended in self._ended.items() if ended <= at}
            entered = tap, self._handed[tap], None if reading is None else reading.taps[taps.index(tap)]
        left = None if end == self.segments else (self.ends[end - 1], self._handed[self.ends[end - 1]])
        return Between(self._model, taps[self.taps(start, end)], own, self._example, passed, entered, left)

    def taps(self, start: int, end: int) -> slice:
        """Return which taps lie in consecutive segments."""
        taps = self._all_taps
        first = taps.index(self.ends[start - 1]) + 1 if start else 0
        return slice(first, len(taps) if end == self.segments else taps.index(self.ends[end - 1]) + 1)

    def handed_like(self, samples: int) -> list[Tensor]:
        """Return on ``meta`` what each segment but the last hands over for so many samples."""
        between, found = self.between(0, self.segments, {}), list[Tensor]()

        def hook(tap: str, _layer: nn.Module, _inputs: Any, output: Any) -> None:
            found.append(self._handed[tap].tensor_in(output))

        for tap in self.ends:
            between.backbone.get_submodule(tap).register_forward_hook(partial(hook, tap))
        with torch.no_grad():
            between(self._example.new_empty((samples, *self._example.shape[1:]), device="meta"))
        return found


def _digest(recording: Recording) -> str:
    """Return a digest of a forward's operators and of the numbers in them, the same on all devices of a kind."""

    def plain(each: Any) -> Any:
        if isinstance(each, torch.device):
            return each.type
        return (each.shape, each.dtype) if isinstance(each, Value) else each

    lines = [f"{each.name} {tree_map(plain, (each.args, each.kwargs))}" for each in recording.operations]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _why_not(call: Call, recording: Recording) -> str | None:
    """Say why no part may end with the call of a tap; None if all that follows reads no more than what it returns."""
    if any(users_hooks(hooks) for hooks in hooks_of(call.layer)):
        return "it carries hooks, which would be called where it is left, and not where the next part is entered"
    (handed,) = call.returned.values()

    def goes_past(value: Value) -> bool:
        born = -1 if value.made_by is None else value.made_by.number
        made = value.made_by is not None or value.leaf in ("input", "mask")
        return made and born < call.ended and value is not handed

    def said(operation: Operation, value: Value) -> str:
        made_by = "the batch" if value.made_by is None else f"what {value.made_by} makes"
        return f"{operation} reads {made_by}, which goes past it"

    later = ((each, value) for each in recording.operations[call.ended :] for value in each.reads)
    return next((said(each, value) for each, value in later if goes_past(value)), None)


def _state(backbone: nn.Module, recording: Recording, ends: Sequence[int]) -> list[State]:
    """Return all parameters and buffers of a backbone with the segments, that end behind so many operations."""
    readers: dict[int, set[int]] = {}
    for operation in recording.operations:
        for value in operation.reads:
            if value.leaf in _STATE and value.tensor is not None:
                readers.setdefault(id(value.tensor), set()).add(bisect_right(ends, operation.number))
    found: dict[int, State] = {}
    for path, layer in backbone.named_modules():
        own = {
            name: tensor for name, tensor in (*layer._parameters.items(), *layer._buffers.items()) if tensor is not None
        }
        of_layer = {min(readers[id(tensor)]) for tensor in own.values() if id(tensor) in readers}
        called = [bisect_right(ends, call.began) for call in recording.calls if call.layer is layer]
        for name, tensor in own.items():  # what a layer reads by way of a cache goes with its call
            segments = readers.get(id(tensor), {min(of_layer or called)} if of_layer or called else set())
            found.setdefault(id(tensor), State(f"{path}.{name}".strip("."), tensor, frozenset(segments)))
    return [*found.values()]
