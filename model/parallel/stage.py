"""``Stage``: the part of a network that one rank runs, micro-batch by micro-batch, in PyTorch's ``PipelineStage``."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...kernels import HeadOutput, decide
from ..early_exit_network import EarlyExitNetwork
from ..module_head import AuxHead
from .answered import packed, settle
from .segments import NETWORK, Segment, from_wire, to_wire, wires_like
from .stage_graph import StageGraph
from .survivors import Merging, Outlet, Passing, empty_rows


class StageFailed(Exception):
    """What a stage's layers or heads raised, with the stage and the place where it runs."""


class Stage(nn.Module):
    """Consecutive segments, their heads, and the outlet to the next stage.

    It takes and returns rows (see ``ROW``) and activations, of one size: what PyTorch's schedules want. The first stage
    takes the places of samples alone, and finds them in the request. A micro-batch without a sample in use is passed on
    at once. The host reads each micro-batch's rows, and so waits for its activations, before it launches more.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        heads: Sequence[AuxHead],
        first_exit: int,
        size: int,
        device: torch.device,
        *,
        merges: bool,
        with_probs: bool,
        name: str,
    ) -> None:
        """Run segments for micro-batches of a size.

        Args:
            segments: with the classifier's logits at the end, or more stages behind.
            heads: one a segment, but for the classifier's.
            first_exit: index of the first of them.
            size: of micro-batches.
            device: of all this.
            merges: hand on open samples alone.
            with_probs: answers have probabilities.
            name: for errors.
        """
        super().__init__()
        self.modules_run = nn.ModuleList([*(segment.module for segment in segments), *heads])
        self.first_exit, self.size, self.device, self.name = first_exit, size, device, name
        self._segments, self._heads, self._with_probs = segments, heads, with_probs
        self._rules = [*(head.rule for head in heads), *([None] if len(heads) < len(segments) else [])]
        wires = wires_like(segments[-1].hands, device)
        self.outlet: Outlet = Merging(size, wires) if merges else Passing(size, wires)
        self._graph: StageGraph | None = None
        self.begin(lambda _: None, None, 0)
        self.busy_since: float | None = None
        """The time at which the micro-batch came that it is at."""

    @property
    def is_first(self) -> bool:
        """Whether it takes samples of the request."""
        return self.first_exit == 0

    @property
    def takes(self) -> tuple[Tensor, ...]:
        """Tensors of the shapes that it takes, on the meta device."""
        rows = empty_rows(self.size).to("meta")
        return (rows[:, 0].contiguous(),) if self.is_first else (rows, *wires_like(self._segments[0].takes, "meta"))

    @property
    def hands(self) -> tuple[Tensor, ...]:
        """The same of what it returns."""
        return (empty_rows(self.size).to("meta"), *wires_like(self._segments[-1].hands, "meta"))

    def capture(self, micro_batch: Tensor) -> None:
        """Capture its computation anew where its device has graphs, for micro-batches like this one."""
        self.close()
        if self.device.type == "cuda":
            example = (
                [micro_batch]
                if self.is_first
                else [each.zero_() for each in wires_like(self._segments[0].takes, self.device)]
            )
            rules = [rule for rule in self._rules if rule is not None]
            self._graph = StageGraph(self._compute, self.modules_run, rules, example)

    def take_rules(self, states: Tensor) -> None:
        """Take over the rules of the first rank's network, [heads, 4]; see :meth:`ExitRule.get_extra_state`."""
        for index, rule in enumerate(self._rules, self.first_exit):
            if rule is not None and not torch.equal(rule.get_extra_state(), states[index]):
                rule.set_extra_state(states[index])

    def refresh(self, network: EarlyExitNetwork) -> None:
        """Copy parameters and buffers of a network where the stage has copies, on another device."""
        now = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        with torch.no_grad():
            for segment in self._segments:
                for name, own in (*segment.module.named_parameters(), *segment.module.named_buffers()):
                    source = now.get(name.removeprefix(NETWORK))
                    if source is not None and source.data_ptr() != own.data_ptr():
                        own.copy_(source)
            for head, source_head in zip(self._heads, network.exit_heads[self.first_exit :], strict=False):
                if head is not source_head:
                    head.load_state_dict(source_head.state_dict())

    def begin(self, answer: Callable[[Tensor], None], x: Tensor | None, last: int) -> None:
        """Begin a request.

        Args:
            answer: called with answers (see ``COLUMNS``) as soon as there are some.
            x: the request, where this is the first stage.
            last: the number of the micro-batch, from 0, after which only empty ones come.
        """
        self._answer, self._x, self._last, self._step = answer, x, last, 0

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Answer for a micro-batch."""
        self.busy_since = time.monotonic()
        try:
            with torch.no_grad():
                return self._forward(*given)
        except Exception as error:  # whatever layers of the user's raise
            raise StageFailed(f"{self.name}: {type(error).__name__}: {error}") from error
        finally:
            self.busy_since = None
            self._step += 1

    def _forward(self, rows: Tensor, *wires: Tensor) -> tuple[Tensor, ...]:
        rows = rows.cpu()
        handed: Sequence[Tensor] | None = None
        if self.is_first:
            rows = torch.stack([rows, *empty_rows(len(rows))[:, 1:].unbind(1)], 1)
        if bool((rows[:, 0] >= 0).any()):
            said, handed = self.computed([self._samples(rows[:, 0])] if self.is_first else wires)
            answers, rows = settle(rows, said.cpu(), self._rules, self.first_exit)
            if len(answers):
                self._answer(answers)
            if not bool((rows[:, 0] >= 0).any()):
                handed = None
        rows, wires_out = self.outlet.hand_on(rows, handed, last=self._step >= self._last)
        return rows.to(self.device), *wires_out

    def computed(self, taken: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the exits say of a micro-batch, packed, and what is handed over; by its graph if it has one."""
        return (self._graph or self._compute)(taken)

    def _samples(self, places: Tensor) -> Tensor:
        """Return the samples at places, which follow each other, with the first one again in empty rows."""
        assert self._x is not None
        count = int((places >= 0).sum())
        samples = self._x[int(places[0]) : int(places[0]) + count].to(self.device)
        return (
            samples
            if count == self.size
            else torch.cat([samples, samples[:1].expand(self.size - count, *samples.shape[1:])])
        )

    def _compute(self, taken: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the exits say, packed, and what is handed over, as it is sent."""
        handed = (
            taken
            if self.is_first
            else [from_wire(x, like) for x, like in zip(taken, self._segments[0].takes, strict=True)]
        )
        said: list[HeadOutput] = []
        for index, segment in enumerate(self._segments):
            read, *handed = segment.module(*handed)
            said.append(self._heads[index](read) if index < len(self._heads) else decide(read, 1.0, 1.0))
        wires = tuple(to_wire(x, like) for x, like in zip(handed, self._segments[-1].hands, strict=True))
        return packed(said, with_probs=self._with_probs), wires

    def close(self) -> None:
        """Free its graph."""
        if self._graph is not None:
            self._graph.close()
