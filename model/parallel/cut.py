"""``Cut``: a network cut at its taps by what one recorded forward has read; ``Placed``: a part of it on its device."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..basics.bad_input import BadInput
from ..basics.memory import allocated_bytes
from ..heads.head import AuxHead
from ..listening.batches import of_size
from ..listening.between import Between
from ..listening.hooks import ThreadHook
from ..listening.reading import Reading, logits_of
from ..listening.rounding import relative_error
from ..listening.segments import Segments
from ..listening.taps import OnTap, listening
from ..network.early_exit_network import EarlyExitNetwork
from ..saving.checkpoint_files import read_tensor
from ..trunk.layer_graph import first_line
from ..trunk.trunk import Trunk, make_trunk


class Cut(Segments):
    """A network in segments, with the heads in them: to be placed on devices."""

    def __init__(self, network: EarlyExitNetwork, example: Tensor) -> None:
        """Record the forward of a network whose taps are checked; see :class:`Segments`."""
        super().__init__(network.backbone, network.taps, example, network.reading)
        self.network = network
        self._moved: list[tuple[Tensor, torch.device]] = []
        self._heads_were: list[tuple[AuxHead, torch.device]] = []
        self._seen = [] if example.is_meta else [self._observed(samples) for samples in (2, 3)]

    def _observed(self, samples: int) -> list[Tensor]:
        """Return a batch of the example's samples, what the segments hand over of it, and what the backbone returns."""
        batch, found = of_size(self._example, samples), list[Tensor]()

        def hook(tap: str, _layer: nn.Module, _inputs: Any, output: Any) -> None:
            found.append(self._handed[tap].tensor_in(output).clone())

        layers = [(tap, self.network.backbone.get_submodule(tap)) for tap in self.ends]
        hooks = [layer.register_forward_hook(ThreadHook(partial(hook, tap))) for tap, layer in layers]
        try:
            with torch.no_grad():
                output = self.network.backbone(batch.clone(memory_format=torch.preserve_format))
        finally:
            for each in hooks:
                each.remove()
        return [batch, *found, logits_of(output, self.network.logits_part)]

    def mixes_samples(self) -> bool:
        """Return whether what is said of a sample depends on how many others there are."""
        if not self._seen:
            return False
        (*_, of_two), (*_, of_three) = self._seen
        return bool(relative_error([of_three[:2]], [of_two.double()]) > _far(of_two.dtype))

    def check_parts(self, starts: Sequence[int]) -> None:
        """Raise ``BadInput`` if two parts, given by their first segments, would read the same parameter or buffer."""
        for name, _, segments in self.state:
            parts = sorted({bisect_right(starts, segment) for segment in segments})
            if len(parts) > 1:
                tap = self.ends[starts[parts[0]] - 1]
                raise BadInput(
                    f"network: its {name!r} is read before the end of {tap!r} and behind it, wants parts that share "
                    "none: name other taps, at which all that read it are on one side"
                )

    def bytes_of(self, start: int, end: int) -> int:
        """Return the bytes of parameters and buffers of consecutive segments with their heads, as allocated."""
        heads = (each for head in self.heads(start, end) for each in (*head.parameters(), *head.buffers()))
        tensors = (*(one.tensor for one in self.read_by(start, end)), *heads)
        return sum(allocated_bytes(each.nbytes) for each in tensors)

    def place(self, start: int, end: int, own: Mapping[int, Tensor], x: Tensor, trunk: str) -> "Placed":
        """Return consecutive segments as they run on the device of ``own``, with a trunk of that kind.

        Args:
            start: the first one.
            end: the one behind the last.
            own: see :class:`Between`.
            x: what they take, on the device.
            trunk: see :func:`make_trunk`.
        """
        between, reading, taps = self.between(start, end, own), self.network.reading, self.taps(start, end)
        if reading is not None:
            reading = Reading(reading.taps[taps], reading.logits if end == self.segments else None)
        with torch.no_grad():
            self._check(between, start, end, x.device)
            made = make_trunk(between, between.taps, x, trunk, reading)
        return Placed(made, between.taps, self.heads(start, end), taps.start, end == self.segments)

    def _check(self, between: Between, start: int, end: int, device: torch.device) -> None:
        """Raise ``BadInput`` unless segments alone say what they said within the whole forward.

        What parts cannot see of earlier layers, such as a device, a number or an object that a layer leaves behind,
        no operation tells of.
        """
        where = f"network: entered behind {self.ends[start - 1]!r}" if start else "network: left early"
        wants = "wants a forward in which all goes through that tap: name other taps"
        for seen in self._seen:
            given, wanted = seen[start].to(device), seen[end].to(device)
            try:
                found = between(given.clone(memory_format=torch.preserve_format))
                found = logits_of(found, self.network.logits_part) if end == self.segments else found
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                said = f"{where} its forward fails ({first_line(error):.200}), as it reads what it makes before"
                raise BadInput(f"{said}; {wants}") from error
            if found.shape != wanted.shape or not relative_error([found], [wanted.double()]) <= _far(wanted.dtype):
                raise BadInput(f"{where} its forward gives other numbers, as it reads what it is told before; {wants}")

    def move(self, start: int, end: int, device: torch.device) -> dict[int, Tensor]:
        """Move what segments have to a device, and return it as :class:`Between` takes it.

        The network's own tensors stay the same objects; what is on ``meta`` is read from the network's checkpoint.
        """
        own = {}
        for name, tensor, _ in self.read_by(start, end):
            own[id(tensor)] = tensor
            self._moved.append((tensor, tensor.device))
            if not tensor.is_meta:
                _assign(tensor, tensor.data.to(device))
            elif self.network.unread is None:
                raise BadInput(f"network: its {name!r} is on meta, wants a network that load_checkpoint made there")
            else:
                _assign(tensor, read_tensor(self.network.unread, f"backbone.{name}", device))
        return own

    def move_back(self) -> None:
        """Move all to where it was."""
        while self._moved:
            tensor, device = self._moved.pop()
            _assign(tensor, tensor.data.to(device))
        while self._heads_were:
            head, device = self._heads_were.pop()
            head.to(device)

    def move_heads(self, heads: Sequence[AuxHead], device: torch.device) -> None:
        """Move heads to a device, with their rules."""
        for head in heads:
            self._heads_were.append((head, head.rule.threshold_tensor.device))
            head.to(device)

    def heads(self, start: int, end: int) -> list[AuxHead]:
        """Return the heads of consecutive segments."""
        return self.network.exit_heads[self.taps(start, end)]


class Placed(NamedTuple):
    """Consecutive segments with their heads on one device, ready to run."""

    trunk: Trunk
    """Takes what the segments before hand over, or the batch, and returns what is handed over, or the logits."""
    taps: Sequence[str]
    """Of the trunk's module."""
    heads: Sequence[AuxHead]
    """One a tap."""
    first_exit: int
    """Index of the first of them."""
    is_last: bool
    """They end with the network's logits."""

    def run(self, x: Tensor, on_tap: OnTap) -> Tensor:
        """Run on what they take; ``on_tap`` is called with what each head reads. Returns what is handed over."""
        with listening(self.trunk.module, self.taps, on_tap, self.trunk.reading):
            output: Tensor = self.trunk.module(x)
        return output if self.trunk.classifier is None else self.trunk.classifier.logits(output)

    @property
    def modules(self) -> nn.ModuleList:
        """All that runs."""
        return nn.ModuleList([self.trunk.module, *self.heads])


def _assign(tensor: Tensor, data: Tensor) -> None:
    """Let a tensor, and its gradient, have other memory, as the same object."""
    if tensor.is_meta == data.is_meta:
        tensor.data = data
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.data.to(data.device)
    else:
        is_parameter = isinstance(tensor, nn.Parameter)
        torch.utils.swap_tensors(tensor, nn.Parameter(data, tensor.requires_grad) if is_parameter else data)


#: How far numbers of one forward on two devices may be from each other, relative to the largest: products in TF32,
#: sums in other orders. What a part has not seen of earlier layers shows in the first digits.
_FAR, _FAR_IN_16_BITS = 0.01, 0.05


def _far(dtype: torch.dtype) -> float:
    return _FAR if dtype.itemsize > 2 else _FAR_IN_16_BITS


def device_of(network: EarlyExitNetwork) -> torch.device:
    """Return the device on which a network's backbone begins; raises ``ValueError`` if only some of it is on ``meta``.

    Later layers may be elsewhere, if its forward goes there. Heads of one on ``meta`` may be, too.
    """
    parameters = dict(network.backbone.named_parameters())
    first = next((each.device for each in parameters.values()), network.device)
    for name, each in parameters.items():
        if each.is_meta != (first.type == "meta"):
            raise ValueError(
                f"network: its backbone's {name!r} is on {each.device}, its first parameter on {first}; wants all on "
                "meta, with a checkpoint that is read when it is split, or none"
            )
    return first
