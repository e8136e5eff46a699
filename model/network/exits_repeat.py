"""ExitsRepeat: the exits of a network, launched for one batch after another; each launch is noted once and repeated."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels import ExitBuffers, ExitHead, ExitLaunch
from ...kernels.cuda.lifetimes import keep_in_children
from ...kernels.launch.check_arguments import check_countable, check_head_arguments
from ...kernels.noted import NotedLaunch, noting
from ..heads.driver_launch import repeated
from ..heads.repeats import ALIGNED, TensorForms

#: Layouts of the inputs of one launch that are remembered, the newest ones.
_MOST_LAYOUTS = 16


class _Told(threading.local):
    """Exit indices as the host reads them, each thread in memory of its own: a copy to pageable memory takes longer."""

    def __init__(self, samples: int, device: torch.device) -> None:
        pinned = torch.empty(samples, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.exit_index = keep_in_children(pinned)
        self.numbers = self.exit_index.numpy()  # the same memory, faster to read


class ExitsRepeat:
    """Launches for the exits of a network.

    Launches at the same place must run one after another: they share their workspace. The answer is written to memory
    that is new for each batch.
    """

    def __init__(
        self, exits: Sequence[ExitHead | None], samples: int, classes: int, *, with_probs: bool, at_each: bool,
        device: torch.device, tallies: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Make one launch for all exits, or one ``at_each``; None is a classifier whose logits are given.

        For ``tallies``, to which every answer is added, see :class:`ExitBuffers`.
        """
        self._exits = exits
        self.parts = [slice(place, place + 1) for place in range(len(exits))] if at_each else [slice(0, len(exits))]
        """The exits of each launch."""
        self.dtypes = [None if head.weight is None else head.weight.dtype for head in exits if head is not None]
        """Of the heads' inputs; None for logits, which may be any floats."""
        self._samples, self._classes = samples, classes
        self._buffers = ExitBuffers.allocate(
            len(exits), samples, classes, with_probs=with_probs, device=device, tallies=tallies
        )
        self.layout = self._buffers.layout
        """Of answers, which are complete after the last launch."""
        self._made: list[list[_OfLayout]] = [[] for _ in self.parts]
        self._told = _Told(samples, device)

    def new_answer(self) -> Tensor:
        """Allocate memory for an answer on the current stream."""
        return torch.empty_like(self._buffers.packed_answer)

    def all_are_sure(self, packed: Tensor) -> bool:
        """Return whether every sample has its answer; the host waits for the launches so far."""
        exit_index = self.layout.view(1, packed, self._samples)
        assert exit_index is not None
        if self._samples == 1:
            return exit_index.item() >= 0
        told = self._told
        told.exit_index.copy_(exit_index, non_blocking=True)
        if packed.is_cuda:
            torch.cuda.current_stream(packed.device).synchronize()
        return bool(told.numbers.min() >= 0)

    def launch(self, index: int, inputs: Sequence[Tensor], packed: Tensor, stream: int) -> None:
        """Make one of the launches on the current stream, given by its handle, too.

        Args:
            index: of the launch; the first of a batch is 0.
            inputs: of its exits: outputs of taps, and logits for the classifier; plain tensors.
            packed: what ``new_answer`` returned for this batch.
            stream: the same at each launch of this index.

        Raises:
            ValueError, TypeError: an input does not fit, as of ``fused_head``; nothing is launched.
        """
        if not self._again(index, inputs, packed):
            inputs = [x.resolve_neg() for x in inputs]  # kernels read the memory as it is
            if not self._again(index, inputs, packed):
                self._first(index, inputs, packed, stream)

    def _again(self, index: int, inputs: Sequence[Tensor], packed: Tensor) -> bool:
        addresses = [*map(Tensor.data_ptr, inputs)]
        for one in self._made[index]:
            if one.fits(inputs, addresses):
                one(inputs, addresses, packed)
                return True
        return False

    def _first(self, index: int, inputs: Sequence[Tensor], packed: Tensor, stream: int) -> None:
        """Check the inputs, make a launch for the first time, and note it."""
        part = self.parts[index]
        for x, head in zip(inputs, self._exits[part], strict=True):
            self._check(x, head)
        aliases = [x.detach() for x in inputs]  # two heads may read one object, and what varies is told by objects
        launch = ExitLaunch(self._buffers, part.start, self._exits[part])
        with noting() as launches:
            launch(aliases, packed)
        made = _OfLayout(launches, launch, self._buffers, inputs, packed, stream)
        self._made[index] = [made, *self._made[index][: _MOST_LAYOUTS - 1]]

    def _check(self, x: Tensor, head: ExitHead | None) -> None:
        device = self._buffers.label.device
        if x.device != device:
            what = "backbone: its logits are" if head is None else "heads: what one reads is"
            raise ValueError(f"{what} on {x.device}, wants {device}, where the batch is")
        if head is not None and head.weight is not None:
            check_head_arguments(x, head.weight, head.bias, head.pool, head.pool_size, head.criterion, head.hidden)
            check_countable(x, head.hidden.first_weight(head.weight).shape[1])
        elif not x.is_floating_point() or x.ndim != 2 or x.shape[1] != self._classes:
            got, whose = f"{x.dtype} of shape {list(x.shape)}", "backbone: its" if head is None else "heads: a module's"
            raise ValueError(f"{whose} logits are {got}, wants floats [N, {self._classes}], as the heads have")
        if x.shape[0] != self._samples:
            raise ValueError(f"x: got shape {list(x.shape)}, wants {self._samples} samples, as the batch has")


class _OfLayout:
    """One launch for inputs of a layout, with other inputs and another answer."""

    def __init__(
        self, launches: Sequence[NotedLaunch], launch: ExitLaunch, buffers: ExitBuffers, inputs: Sequence[Tensor],
        packed: Tensor, stream: int,
    ) -> None:  # fmt: skip
        *before, noted = launches
        given = noted.given()
        reads = [arguments[0][0] for arguments, _ in given["places"]]
        probs, label, confidence, exit_index = given["answer"]
        answer = (label, exit_index, confidence, *([] if probs is None else [probs]))
        self._buffers, self._compiled = buffers, noted.compiled
        # By offset in bytes: the answer's parts lie in one tensor.
        self._offsets = [part.data_ptr() - packed.data_ptr() for part in answer]
        self._launch = launch if launch.by_library else None
        sources = {id(features): x for one in before for (x, *_), features, _ in one.given()["packed"]}
        self._packed = [] if launch.by_library else [i for i, x in enumerate(reads) if id(x) in sources]
        features = [reads[i] for i in self._packed]
        # like tensors that stay: torch.empty takes twice the time, since it looks for the device
        self._features = [(x.new_empty(1), x.shape) for x in features]
        of_pack = [*[sources[id(x)] for x in features], *features]
        self._pack = repeated(before[0], of_pack, stream) if features else None
        self._repeat = repeated(noted, [*reads, *answer], stream)
        self._forms = TensorForms(_distinct(inputs))
        self._alignments = [x.data_ptr() % ALIGNED for x in inputs]

    def fits(self, inputs: Sequence[Tensor], addresses: Sequence[int]) -> bool:
        aligned = [address % ALIGNED for address in addresses] == self._alignments
        return aligned and self._forms.are_those_of(_distinct(inputs))

    def __call__(self, inputs: Sequence[Tensor], addresses: Sequence[int], packed: Tensor) -> None:
        if self._launch is not None:
            inputs = self._launch.run_before(inputs)
            addresses = [*map(Tensor.data_ptr, inputs)]
        # each call's own: a thread may launch between two launches of another one
        features = [one.new_empty(shape) for one, shape in self._features]
        read: list[Any] = [*addresses] if self._compiled else [*inputs]
        if self._pack is not None:
            packed_features = [*map(Tensor.data_ptr, features)] if self._compiled else features
            self._pack([*[read[i] for i in self._packed], *packed_features])
            for i, one in zip(self._packed, packed_features, strict=True):
                read[i] = one
        if self._compiled:
            first = packed.data_ptr()
            self._repeat([*read, *[first + offset for offset in self._offsets]])
        else:
            self._repeat([*read, *[part for part in self._buffers.answer(packed) if part is not None]])


def _distinct(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors of the same forms, no two of which are the same object: two heads may read one."""
    return tensors if len({*map(id, tensors)}) == len(tensors) else [x.detach() for x in tensors]
