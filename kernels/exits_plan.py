"""ExitsPlan: the exits of a network in a few launches, noted once and repeated with other inputs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .answer_layout import AnswerLayout
from .exit_launch import ExitBuffers, ExitHead, ExitLaunch
from .head_arguments import check_countable, check_head_arguments
from .noted_launch import NotedLaunch, noting

#: Layouts of the inputs of one launch that are remembered; before there are more it forgets them all.
_MOST_LAYOUTS = 16
#: Arguments of the kernel that lie in the answer, in the order of ``ExitBuffers.answer``.
_ANSWER = ("answer_label", "answer_exit", "answer_confidence", "answer_probs")


class ExitsPlan:
    """Launches for the exits of a network, for one layout of what they read.

    Launches at the same place must run one after another: they share their workspace. The answer is written to memory
    that is new for each batch.
    """

    def __init__(
        self, exits: Sequence[ExitHead | None], samples: int, classes: int, *, with_probs: bool, at_each: bool,
        device: torch.device,
    ) -> None:  # fmt: skip
        """Plan one launch for all exits, or one ``at_each``; None is a classifier whose logits are given."""
        self._exits = exits
        self.parts = [slice(place, place + 1) for place in range(len(exits))] if at_each else [slice(0, len(exits))]
        """The exits of each launch."""
        self.dtypes = [head.weight.dtype for head in exits if head is not None]
        """Of the heads' inputs."""
        self._samples, self._classes = samples, classes
        self._buffers = ExitBuffers.allocate(len(exits), samples, classes, with_probs=with_probs, device=device)
        self.layout = AnswerLayout(self._buffers)
        """Of answers, which are complete after the last launch."""
        self._repeated: list[dict[tuple[Any, ...], _Repeated]] = [{} for _ in self.parts]

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
            inputs: of its exits: outputs of taps, and logits for the classifier.
            packed: what ``new_answer`` returned for this batch.
            stream: the same at each launch of this index.

        Raises:
            ValueError, TypeError: an input does not fit, as of ``fused_head``; nothing is launched.
        """
        layouts = tuple([(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in inputs])
        repeated = self._repeated[index].get(layouts)
        if repeated is not None:
            repeated(inputs, packed, stream)
            return
        part = self.parts[index]
        for x, head in zip(inputs, self._exits[part], strict=True):
            self._check(x, head)
        launch = ExitLaunch(replace(self._buffers, packed_answer=packed), part.start, self._exits[part])
        with noting() as launches:
            launch(inputs)
        if len(self._repeated[index]) >= _MOST_LAYOUTS:
            self._repeated[index].clear()
        self._repeated[index][layouts] = _Repeated(launches[0], launch, self._buffers, packed)

    def _check(self, x: Tensor, head: ExitHead | None) -> None:
        device = self._buffers.label.device
        if x.device != device:
            what = "backbone: its logits are" if head is None else "heads: a tap's output is"
            raise ValueError(f"{what} on {x.device}, wants {device}, where the batch is")
        if head is not None:
            check_head_arguments(x, head.weight, head.bias, head.pool, head.pool_size, "max_prob")
            check_countable(x, head.weight.shape[1])
        elif not x.is_floating_point() or x.ndim != 2 or x.shape[1] != self._classes:
            got = f"{x.dtype} of shape {list(x.shape)}"
            raise ValueError(f"backbone: its logits are {got}, wants floats [N, {self._classes}], as the heads have")
        if x.shape[0] != self._samples:
            raise ValueError(f"x: got shape {list(x.shape)}, wants {self._samples} samples, as the batch has")


class _Repeated:
    """One launch, with other inputs and another answer."""

    def __init__(self, noted: NotedLaunch, launch: ExitLaunch, buffers: ExitBuffers, packed: Tensor) -> None:
        given = noted.given()
        places = list(given)
        self._launch = launch  # and with it the workspace
        self._buffers = buffers
        self._again = noted.again()
        self._compiled = noted.compiled
        self._address: Callable[[Tensor], Any] = Tensor.data_ptr if noted.compiled else lambda tensor: tensor

        def fixed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(fixed, value))
            return self._address(value) if isinstance(value, Tensor) else value

        self._heads = places.index("heads")
        self._rest = [fixed(head[1:]) for head in given["heads"]]  # the input comes first
        # By offset in bytes: the answer's parts lie in one tensor.
        self._answer = [
            (places.index(name), part, given[name].data_ptr() - packed.data_ptr())
            for part, name in enumerate(_ANSWER)
            if given[name] is not None
        ]
        self._arguments = [None if name in ("heads", *_ANSWER) else fixed(value) for name, value in given.items()]

    def __call__(self, inputs: Sequence[Tensor], packed: Tensor, stream: int) -> None:
        arguments = self._arguments.copy()
        address = self._address
        arguments[self._heads] = tuple([(address(one), *rest) for one, rest in zip(inputs, self._rest, strict=True)])
        if self._compiled:
            first = packed.data_ptr()
            for place, _, offset in self._answer:
                arguments[place] = first + offset
        else:
            parts = self._buffers.answer(packed)
            for place, part, _ in self._answer:
                arguments[place] = parts[part]
        self._again(*arguments, stream=stream)
