"""ExitLaunch: launches the heads of a captured network; ExitBuffers: their outputs and merged answer, kept in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch.choose_config import choose_config
from .launch.constants import HeadConstants, LaunchConstants, LogitsConstants
from .launch.head_view import HeadView, head_view
from .launch.launch_config import Programs, most_registers
from .launch.memory import HeadArguments, Workspace, last_memory
from .launch.residency import is_recording, new_turns
from .noted import launch
from .reference.criteria import CRITERIA, number_of
from .reference.hidden_layers import NO_LAYERS, HiddenLayers


class ExitHead(NamedTuple):
    """A head's parameters and rule, as of :func:`auxhead.kernels.fused_head`.

    Without a weight the head is the rule alone: a launch is given its logits [N, K] instead of its features.

    Tensors, [1] float32 those of the rule, are read anew in every launch, so that they may change in place.
    """

    weight: Tensor | None
    bias: Tensor | None
    temperature: Tensor
    threshold: Tensor
    pool: str
    pool_size: tuple[int, int]
    criterion: str = "max_prob"
    """Part of the launch's code: another one wants another launch."""
    hidden: HiddenLayers = NO_LAYERS
    """Layers before the last one, which ``weight`` and ``bias`` are."""


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
    """[1] int64: requests so far, counted by a launch at place 0 if it has ``open_samples``."""
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

    def answer(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """View ``packed_answer`` or a copy of it: label [N] int64, exit [N] int64, confidence [N], probs [N, K]."""
        samples = self.label.shape[1]
        label, exit_index, confidence, probs = packed.split(
            [8 * samples, 8 * samples, 4 * samples, packed.numel() - 20 * samples]
        )
        return (
            label.view(torch.int64),
            exit_index.view(torch.int64),
            confidence.view(torch.float32),
            None if self.probs is None else probs.view(torch.float32).view(samples, -1),
        )


class AnswerLayout:
    """The parts of ``ExitBuffers.packed_answer`` and of copies of it; see :meth:`ExitBuffers.answer`."""

    def __init__(self, buffers: ExitBuffers) -> None:
        """Find out where the parts lie: first byte, bytes of a sample, dtype and shape of a sample."""
        packed = buffers.packed_answer
        self._parts = [
            None if part is None else (part.data_ptr() - packed.data_ptr(), part[0].nbytes, part.dtype, part.shape[1:])
            for part in buffers.answer(packed)
        ]

    def view(self, index: int, packed: Tensor, samples: int) -> Tensor | None:
        """View a part for the first samples, of the shape and dtype that it has there.

        The index is 0 for the label [N], 1 for the exit [N], 2 for the confidence [N], 3 for the probabilities [N, K],
        which is None where there are none.
        """
        part = self._parts[index]
        if part is None:
            return None
        start, row, dtype, shape = part
        view = packed[start : start + samples * row].view(dtype)
        return view.view(samples, *shape) if shape else view


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
        self._spaces: dict[int, _Space] = {}
        self._records = is_recording()
        self._turns: dict[int, Tensor | None] = {}  # by the pieces of work, which follow from the inputs
        self.compiled: Any = None
        """Triton's compiled kernel of the last call; None before, and where it is interpreted."""

    def __call__(self, inputs: Sequence[Tensor]) -> None:
        """Launch on the current stream.

        The first launch allocates workspace and compiles; it must not be captured. Later ones do neither.

        Args:
            inputs: of each head its tap's output, as ``fused_head`` reads it; logits [N, K] for None and for a head
                without a weight.
        """
        from .jit import exits as exit_kernel

        buffers = self._buffers
        samples = buffers.label.shape[1]
        last = self._heads[-1]
        classes = inputs[-1].shape[1] if last is None or last.weight is None else last.weight.shape[0]
        spaces = [
            None if head is None or head.weight is None else self._space(i, head, x)
            for i, (head, x) in enumerate(zip(self._heads, inputs, strict=True))
        ]
        places: list[tuple[Any, ...]] = []
        constants: list[HeadConstants | LogitsConstants] = []
        # One stage of all heads after the other: programs that wait start when there is nothing else left to start.
        stages = [(samples,) if space is None else space.programs.stages for space in spaces]
        starts = [0, *accumulate(map(sum, zip_longest(*stages, fillvalue=0)))]
        total = starts.pop()
        for head, x, space, own in zip(self._heads, inputs, spaces, stages, strict=True):
            if head is None or space is None:  # logits
                rule = (None, None) if head is None else (head.temperature, head.threshold)
                places.append((((x, *x.stride()), rule), starts[0]))
                constants.append(LogitsConstants(number_of("max_prob" if head is None else head.criterion)))
            else:
                places.append((space.arguments(x, head), tuple(starts[: len(own)])))
                constants.append(space.constants)
            starts = [start + count for start, count in zip_longest(starts, own, fillvalue=0)]
        # Heads that share a launch share its limits: those of the heads that have any, lest one be starved the largest.
        configs = [space.constants for space in spaces if space]
        num_warps = max([4 if None in spaces else 1, *(config.num_warps for config in configs)])
        max_registers = max((config.max_registers for config in configs), default=0)
        most = max((config.max_programs for config in configs), default=0)
        bounded = 0 < most < total
        grid = most if bounded else total
        if self._records and total not in self._turns:
            self._turns[total] = new_turns(total, grid, num_warps, buffers.label.device)
        launch_constants = LaunchConstants(
            tuple(constants), classes, bounded, True, self._place, self._last, self._patience is not None
        )
        answer_label, answer_exit, answer_confidence, answer_probs = buffers.answer(buffers.packed_answer)
        with torch.cuda.device_of(buffers.label):
            given = (
                tuple(places), (buffers.probs, buffers.label, buffers.confidence, buffers.exits),
                (answer_probs, answer_label, answer_confidence, answer_exit),
                buffers.valid, self._counters, (self._open_samples, buffers.requests, self._condition),
                buffers.tallies, self._patience, total, self._turns.get(total), samples, launch_constants,
            )  # fmt: skip
            options = {"num_warps": num_warps, "maxnreg": max_registers or most_registers(num_warps)}
            self.compiled = launch(exit_kernel.exit_kernel, (grid, 1, 1), given, options)

    def _space(self, place: int, head: ExitHead, x: Tensor) -> "_Space":
        view = head_view(x.shape, x.stride(), head.pool, head.pool_size)
        space = self._spaces.get(place)
        if space is None or space.view != view:
            space = self._spaces[place] = _Space.allocate(view, head, x)
        return space


class _Space(NamedTuple):
    """Launch constants and workspace of one head for one layout of its input."""

    view: HeadView
    constants: HeadConstants
    programs: Programs
    workspace: Workspace
    logits: Tensor | None

    @classmethod
    def allocate(cls, view: HeadView, head: ExitHead, x: Tensor) -> "_Space":
        assert head.weight is not None
        pool_max = head.pool == "max"
        classes = head.weight.shape[0]
        config = choose_config(
            view, classes, pool_max=pool_max, dtype=x.dtype, device=x.device, place="network", hidden=head.hidden
        )
        constants = HeadConstants.of(
            config, view, head.weight, pool_max=pool_max, criterion=head.criterion, hidden=head.hidden
        )
        programs = config.programs(view, classes, head.hidden)
        zeros = torch.zeros(programs.zeroed, dtype=torch.int32, device=x.device)
        logits = last_memory(zeros, programs, head.weight, head.hidden, x.shape[0])
        return cls(view, constants, programs, Workspace.of(config, programs, zeros, x.dtype), logits)

    def arguments(self, x: Tensor, head: ExitHead) -> tuple[Any, ...]:
        assert head.weight is not None
        rule = (head.temperature, head.threshold)
        return tuple(
            HeadArguments.of(x, self.view, head.weight, head.bias, head.hidden, rule, self.workspace, self.logits)
        )
