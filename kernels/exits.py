"""ExitLaunch: one launch for successive heads of a network; ExitBuffers: their outputs and answer, kept in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .before_launch import HeadInput, head_that_reads, library_adds_bias, run_before_launch
from .launch.choose_config import choose_config
from .launch.constants import HeadConstants, LaunchConstants, LogitsConstants
from .launch.head_view import HeadView, head_view
from .launch.launch_config import LaunchConfig, most_registers, warps_for_logits
from .launch.memory import HeadArguments, strided
from .launch.residency import new_turns
from .noted import launch
from .reference.criteria import CRITERIA, number_of
from .reference.hidden_layers import NO_LAYERS, HiddenLayers


class ExitHead(NamedTuple):
    """A head's parameters and rule, as of :func:`auxhead.kernels.fused_head`.

    Tensors are read anew in every launch, so that they may change in place; another criterion wants another launch.
    None is checked.
    """

    weight: Tensor | None
    """[K, features], or [K, H] of hidden features. None: the head is the rule alone, and a launch is given its logits
    [N, K] in place of its features."""
    bias: Tensor | None
    """[K], or None."""
    temperature: Tensor
    """[1] float32."""
    threshold: Tensor
    """[1] float32."""
    pool: str
    """"avg", "max", "first" or "none"."""
    pool_size: tuple[int, int]
    """Windows of a map, down and across; (1, 1) of all else."""
    criterion: str = "max_prob"
    """A name of ``CRITERIA``."""
    hidden: HiddenLayers = NO_LAYERS
    """Layers before the last one, which is ``weight`` and ``bias``."""


#: Label [N] int64, exit_index [N] int64, confidence [N] float32, probs [N, K] float32 or None: int64 come first.
#: A kernel takes them in the order of a ``HeadOutput``.
Answer = tuple[Tensor, Tensor, Tensor, Tensor | None]


class AnswerLayout(NamedTuple):
    """Where the parts of an answer lie in ``ExitBuffers.packed_answer`` and in copies of it."""

    samples: int  # of the batch that it is captured for
    classes: int | None  # None: there are no probabilities

    def view(self, index: int, packed: Tensor, samples: int) -> Tensor | None:
        """View a part for the first samples.

        The index is 0 for the label [N] int64, 1 for exit_index [N] int64, 2 for the confidence [N] float32, 3 for the
        probabilities [N, K] float32, which is None where there are none.
        """
        classes = self.classes or 0
        row, start = (8, 8, 4, 4 * classes)[index], (0, 8, 16, 20)[index] * self.samples  # in bytes
        view = packed[start : start + samples * row].view(torch.int64 if index < 2 else torch.float32)
        return view if index < 3 else view.view(samples, classes) if classes else None


@dataclass(frozen=True)
class ExitBuffers:
    """Outputs of every exit for a batch, and the answer merged from them, at fixed addresses.

    A place is an exit index: the heads from 0, last the classifier. N is the captured batch size, K the classes.
    """

    label: Tensor
    """[places, N] int64."""
    confidence: Tensor
    """[places, N] float32."""
    exits: Tensor
    """[places, N] bool, as of ``HeadOutput``."""
    probs: Tensor | None
    """[places, N, K] float32, or None if they are not wanted."""
    packed_answer: Tensor
    """The answer as bytes, to be copied in one go; see ``answer``."""
    valid: Tensor
    """[1] int32: how many samples of the batch, the first ones, are no padding."""
    requests: Tensor
    """[1] int64: requests so far, counted at place 0 if it has ``open_samples``, or by what fills a smaller batch."""
    tallies: Tensor | None
    """[places, TALLY_BINS] int64: answers of each exit so far, in bins of their confidence, or None not to count."""

    @classmethod
    def allocate(
        cls, places: int, samples: int, classes: int, *, with_probs: bool, device: torch.device,
        tallies: Tensor | None = None,
    ) -> "ExitBuffers":  # fmt: skip
        """Allocate buffers, zeroed, for a network with ``places`` exits, classifier included; tallies are given."""
        zeros = partial(torch.zeros, device=device)
        return cls(
            label=zeros(places, samples, dtype=torch.int64),
            confidence=zeros(places, samples, dtype=torch.float32),
            exits=zeros(places, samples, dtype=torch.bool),
            probs=zeros(places, samples, classes, dtype=torch.float32) if with_probs else None,
            packed_answer=zeros(samples * (8 + 8 + 4 + (4 * classes if with_probs else 0)), dtype=torch.uint8),
            valid=torch.full((1,), samples, dtype=torch.int32, device=device),
            requests=zeros(1, dtype=torch.int64),
            tallies=tallies,
        )

    @property
    def layout(self) -> AnswerLayout:
        """Of ``packed_answer``."""
        return AnswerLayout(self.label.shape[1], None if self.probs is None else self.probs.shape[2])

    def answer(self, packed: Tensor) -> Answer:
        """View ``packed_answer`` or a copy of it.

        Label [N] int64, exit_index [N] int64, confidence [N] float32, and probs [N, K] float32 or None.
        """
        return cast(Answer, tuple(self.layout.view(index, packed, self.label.shape[1]) for index in range(4)))


class ExitLaunch:
    """One launch for successive exits of a network."""

    def __init__(
        self, buffers: ExitBuffers, place: int, heads: Sequence[ExitHead | None], *, open_samples: Tensor | None = None,
        condition: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Serve ``heads``, the first of which is at ``place``.

        Args:
            buffers: of the network.
            place: exit index of the first head.
            heads: None is a classifier whose logits are given instead of features, and which has no rule: it is the
                network's last exit.
            open_samples: [1] int64 in pinned memory, to which the launch writes how many samples stay open, plus the
                number of the request times 2 ** 32, so that what an earlier request left is told from it.
            condition: [1] int64, handle of a conditional node, whose value becomes 1 while samples stay open, else 0.

        Raises:
            ValueError: None is not the network's last place.
        """
        places, samples = buffers.label.shape
        self._buffers = buffers
        self._place = place
        self._heads = heads
        self._open_samples = open_samples
        self._condition = condition
        self._last = place + len(heads) == places
        if None in heads and not (self._last and heads.index(None) == len(heads) - 1):
            raise ValueError(f"heads: got {heads}, wants None for no other than the network's last place")
        patient = [head.threshold if head and CRITERIA[head.criterion].counts_heads else None for head in heads]
        self._patience = tuple(patient) if any(one is not None for one in patient) else None
        device = buffers.label.device
        sizes = ((samples, torch.int32), (1, torch.int64), (1, torch.int32))
        self._counters = tuple(torch.zeros(size, dtype=dtype, device=device) for size, dtype in sizes)
        self._spaces: dict[int, _Space] = {}  # by the head's position in this launch
        self._turns: dict[int, Tensor | None] = {}  # by the pieces of work, which follow from the inputs

    def __call__(self, inputs: Sequence[Tensor], packed_answer: Tensor | None = None) -> None:
        """Launch on the current stream, after what comes before: see ``run_before``.

        The first call, or one for inputs of another layout, allocates workspace and compiles; it must not be captured.
        Later ones do neither, but for a library's logits and packed features.

        Args:
            inputs: of each head its tap's output, as ``fused_head`` reads it; logits [N, K] for None and for a head
                without a weight.
            packed_answer: takes the network's answer in place of that of the buffers.
        """
        from .jit import exits as exit_kernel

        buffers, last = self._buffers, self._heads[-1]
        samples = buffers.label.shape[1]
        classes = inputs[-1].shape[1] if last is None or last.weight is None else last.weight.shape[0]
        read = self.run_before(inputs)
        fused = {i: space for i, space in self._spaces.items() if not space.config.by_library}
        spaces = [fused.get(i) for i in range(len(inputs))]
        places: list[tuple[Any, ...]] = []
        constants: list[HeadConstants | LogitsConstants] = []
        # One stage of all heads after the other: programs that wait start when there is nothing else left to start.
        stages = [(samples,) if space is None else space.stages for space in spaces]
        starts = [0, *accumulate(map(sum, zip_longest(*stages, fillvalue=0)))]
        total = starts.pop()
        for i, (head, x, space, own) in enumerate(zip(self._heads, read, spaces, stages, strict=True)):
            if head is None or space is None:  # logits
                rule = (None, None) if head is None else (head.temperature, head.threshold)
                bias = self._spaces[i].bias if i in self._spaces else None if head is None else head.bias
                places.append(((strided(x), strided(bias), rule), starts[0]))
                constants.append(LogitsConstants(number_of("max_prob" if head is None else head.criterion)))
            else:
                arguments = space.arguments._replace(x=(x, *space.read.strides))
                places.append((tuple(arguments), tuple(starts[: len(own)])))
                constants.append(space.constants)
            starts = [start + count for start, count in zip_longest(starts, own, fillvalue=0)]
        # A launch has one number of warps, and one limit of registers and of programs: the largest of any head that has
        # one, which binds those without, too.
        configs = [space.constants for space in spaces if space]
        for_logits = 4 if configs else warps_for_logits(classes)
        num_warps = max([for_logits if None in spaces else 1, *(config.num_warps for config in configs)])
        max_registers = max((config.max_registers for config in configs), default=0)
        most = max((config.max_programs for config in configs), default=0)
        grid = min(most or total, total)
        if total not in self._turns:
            self._turns[total] = new_turns(total, grid, num_warps, buffers.label.device)
        launch_constants = LaunchConstants(
            tuple(constants), classes, grid < total, True, self._place, self._last, self._patience is not None
        )
        packed_answer = buffers.packed_answer if packed_answer is None else packed_answer
        label, exit_index, confidence, probs = buffers.answer(packed_answer)
        with torch.cuda.device_of(buffers.label):
            given = (
                tuple(places), (buffers.probs, buffers.label, buffers.confidence, buffers.exits),
                (probs, label, confidence, exit_index),
                buffers.valid, self._counters, (self._open_samples, buffers.requests, self._condition),
                buffers.tallies, self._patience, total, self._turns[total], samples, launch_constants,
            )  # fmt: skip
            options = {"num_warps": num_warps, "maxnreg": most_registers(num_warps, max_registers)}
            launch(exit_kernel.exit_kernel, (grid, 1, 1), given, options)

    @property
    def by_library(self) -> list[int]:
        """Exit indices of heads that a library multiplies; known from the first launch on."""
        return [self._place + i for i, space in sorted(self._spaces.items()) if space.config.by_library]

    @property
    def packed(self) -> list[int]:
        """Exit indices of heads packed for a launch that multiplies; known from the first launch on."""
        return [self._place + i for i, space in sorted(self._spaces.items()) if space.config.packs]

    def run_before(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run what comes before a launch for ``inputs``; return what that reads: these, packed features, or logits."""
        read, before = dict(enumerate(inputs)), {}
        for i, (head, x) in enumerate(zip(self._heads, inputs, strict=True)):
            if head is None or head.weight is None:
                continue
            view = head_view(x.shape, x.stride(), head.pool, head.pool_size)
            if i not in self._spaces or self._spaces[i].view != view:  # or an input of another layout
                self._spaces[i] = _Space.allocate(view, head, x)
            config, pool_max = self._spaces[i].config, head.pool == "max"
            before[i] = HeadInput(x, view, head.weight, head.bias, head.hidden, config, pool_max)
        read |= zip(before, run_before_launch([*before.values()]), strict=True)
        return [*read.values()]


class _Space(NamedTuple):
    """Launch constants and workspace of one head for one layout of its input."""

    view: HeadView  # of the input
    config: LaunchConfig
    bias: Tensor | None  # that a launch of logits adds
    read: HeadView  # of what programs that multiply read: the input, or packed features
    constants: HeadConstants
    stages: tuple[int, ...]
    arguments: HeadArguments

    @classmethod
    def allocate(cls, view: HeadView, head: ExitHead, x: Tensor) -> "_Space":
        weight, hidden, pool_max = head.weight, head.hidden, head.pool == "max"
        assert weight is not None
        chosen = choose_config(
            view, weight.shape[0], pool_max=pool_max, dtype=x.dtype, device=x.device, hidden=hidden, beside_trunk=True
        )
        read, config, hidden, pool_max = head_that_reads(view, chosen, hidden, pool_max=pool_max)
        constants = HeadConstants.of(config, read, weight, pool_max=pool_max, criterion=head.criterion, hidden=hidden)
        programs = config.programs(read, weight.shape[0], hidden)
        zeros = torch.zeros(programs.zeroed, dtype=torch.int32, device=x.device)
        arguments = HeadArguments.of(
            x, read, weight, head.bias, hidden, (head.temperature, head.threshold), config, programs, zeros
        )
        bias = None if library_adds_bias(chosen, x) else head.bias
        return cls(view, chosen, bias, read, constants, programs.stages, arguments._replace(x=()))
