"""The exits of a network in a few launches, checked once and repeated with other inputs; forms of tensors."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # in PyTorch's core; Dynamo itself is not imported

from ..exits import AnswerLayout, ExitBuffers, ExitHead, ExitLaunch
from ..launch.head_arguments import check_countable, check_head_arguments
from .noted import NotedLaunch, Path, noting


class TensorForms:
    """Forms of some tensors, no two of which are the same object.

    What ``torch.compile`` guards its code by: one call of C for all tensors, where shapes and strides of each one by
    one take several times that, a microsecond for eight heads' parameters where it was six.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Remember the tensors' forms, and none of the tensors."""
        inference = torch.is_inference_mode_enabled()  # a guard holds for the mode that it was made in
        self._fit = {}
        for mode in (inference, not inference):
            with nullcontext() if mode is inference else torch.inference_mode(mode):
                self._fit[mode] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def are_those_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether as many tensors have these forms, and mean the same by their memory (lazily negated or not).

        Neither modes, transforms nor autocast may be active but those that were.
        """
        return bool(self._fit[torch.is_inference_mode_enabled()](*tensors))


#: Layouts of the inputs of one launch that are remembered; before there are more it forgets them all.
_MOST_LAYOUTS = 16
#: Triton's code for an input that is aligned to so many bytes is another than for one that is not.
_ALIGNED = 16
#: Arguments of the kernel that lie in the answer, in the order of ``ExitBuffers.answer``.
_ANSWER = ("answer_label", "answer_exit", "answer_confidence", "answer_probs")


class ExitsRepeat:
    """Launches for the exits of a network, for one layout of what they read.

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
        self.layout = AnswerLayout(self._buffers)
        """Of answers, which are complete after the last launch."""
        self._repeated: list[dict[tuple[Any, ...], _Repeated]] = [{} for _ in self.parts]
        self._latest: list[dict[bool, _Latest]] = [{} for _ in self.parts]  # by inference mode: outputs are of it, too

    def new_answer(self) -> Tensor:
        """Allocate memory for an answer on the current stream."""
        return torch.empty_like(self._buffers.packed_answer)

    def all_are_sure(self, packed: Tensor) -> bool:
        """Return whether every sample has its answer; the host waits for the launches so far."""
        exit_index = self.layout.view(1, packed, self._samples)
        assert exit_index is not None
        return exit_index.item() >= 0 if self._samples == 1 else bool(exit_index.cpu().min() >= 0)

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
        addresses = [*map(Tensor.data_ptr, inputs)]
        latest = self._latest[index].get(torch.is_inference_mode_enabled())
        if latest is not None and latest.fits(inputs, addresses):
            latest.repeated(inputs, addresses, packed)
            return
        inputs = [x.resolve_neg() for x in inputs]  # kernels read the memory as it is
        layouts = tuple([(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % _ALIGNED) for x in inputs])
        repeated = self._repeated[index].get(layouts)
        if repeated is None:
            repeated = self._first(index, inputs, layouts, packed, stream)
        else:
            repeated(inputs, [*map(Tensor.data_ptr, inputs)], packed)
        self._latest[index][torch.is_inference_mode_enabled()] = _Latest.of(inputs, repeated)

    def _first(self, index: int, inputs: Sequence[Tensor], layouts: Any, packed: Tensor, stream: int) -> "_Repeated":
        """Check the inputs, make a launch for the first time, and note it."""
        part = self.parts[index]
        for x, head in zip(inputs, self._exits[part], strict=True):
            self._check(x, head)
        launch = ExitLaunch(replace(self._buffers, packed_answer=packed), part.start, self._exits[part])
        with noting() as launches:
            launch(inputs)
        if len(self._repeated[index]) >= _MOST_LAYOUTS:
            self._repeated[index].clear()
        repeated = self._repeated[index][layouts] = _Repeated(launches[0], launch, self._buffers, packed, stream)
        return repeated

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


class _Repeated:
    """One launch, with other inputs and another answer."""

    def __init__(
        self, noted: NotedLaunch, launch: ExitLaunch, buffers: ExitBuffers, packed: Tensor, stream: int
    ) -> None:
        given = noted.given()
        self._launch = launch  # and with it the workspace
        self._buffers = buffers
        self._compiled = noted.compiled
        parts = [part for part, name in enumerate(_ANSWER) if given[name] is not None]
        self._parts = parts
        # By offset in bytes: the answer's parts lie in one tensor.
        self._offsets = [given[_ANSWER[part]].data_ptr() - packed.data_ptr() for part in parts]
        of_inputs: list[Path] = [("heads", place, 0) for place in range(len(given["heads"]))]
        self._repeat = noted.repeat([*of_inputs, *((_ANSWER[part],) for part in parts)], stream)

    def __call__(self, inputs: Sequence[Tensor], addresses: Sequence[int], packed: Tensor) -> None:
        if self._compiled:
            first = packed.data_ptr()
            self._repeat([*addresses, *[first + offset for offset in self._offsets]])
        else:
            answer = self._buffers.answer(packed)
            self._repeat([*inputs, *[answer[part] for part in self._parts]])


class _Latest(NamedTuple):
    """The launch that was made last, and what its inputs were like: mostly the next ones are, too."""

    forms: TensorForms
    alignments: list[int]
    repeated: _Repeated

    @classmethod
    def of(cls, inputs: Sequence[Tensor], repeated: _Repeated) -> "_Latest":
        return cls(TensorForms(inputs), [x.data_ptr() % _ALIGNED for x in inputs], repeated)

    def fits(self, inputs: Sequence[Tensor], addresses: Sequence[int]) -> bool:
        return self.forms.are_those_of(inputs) and [address % _ALIGNED for address in addresses] == self.alignments
