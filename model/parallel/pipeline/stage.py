"""``Stage``: the part of a network that one rank runs, micro-batch by micro-batch, in PyTorch's ``PipelineStage``."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....kernels import decide
from ...answers.rule_order import ordered_write
from ...network.early_exit_network import EarlyExitNetwork
from ...runners.captured_network import Addresses
from ..segments import NETWORK
from .answered import (
    STATE,
    Answers,
    CutNetwork,
    ExitDecisions,
    first_state,
    from_wire,
    settle,
    to_wire,
    wires_like,
)
from .stage_graph import Computed, StageGraph, beside


class StageFailed(Exception):
    """What a stage's layers or heads raised, with the stage and the place where it runs."""


class RequestPart(NamedTuple):
    """What a stage is told of a request, or of a part of one that goes through a schedule at once."""

    first: int
    """Place of its first sample in the request."""
    end: int
    """The one after its last."""
    answer: Callable[[Answers], None]
    """Called with answers (see ``COLUMNS``) as soon as there are some."""
    x: Tensor | None = None
    """The whole request, where this is the first stage."""


class Stage(nn.Module):
    """Consecutive segments and their heads.

    It takes and returns the state of samples (see ``STATE``) and activations, of one size: what PyTorch's schedules
    want. The first stage finds its samples in the request, and begins with one micro-batch more than it has handed on.
    Each is handed on as it is, with answered samples in it, so that the host waits for nothing: it is ahead of the
    devices all the time.
    """

    def __init__(
        self,
        cut: CutNetwork,
        start: int,
        end: int,
        size: int,
        device: torch.device,
        name: str,
    ) -> None:
        """Run the segments of a cut from ``start`` to before ``end`` for micro-batches; ``name`` is for errors."""
        super().__init__()
        segments, heads = cut.segments[start:end], cut.heads[start:end]
        self.modules_run = nn.ModuleList([*(segment.module for segment in segments), *heads])
        self.first_exit, self.size, self.device, self.name = start, size, device, name
        self._cut = cut._replace(segments=segments, heads=heads)  # copies of others on the device are freed
        self._segments, self._heads, self.form = segments, heads, cut.form
        self.is_first, self.is_last = start == 0, len(heads) < len(segments)
        """Whether it takes samples of the request; and whether it answers for all that comes, and hands nothing on."""
        self._rules = [*(head.rule for head in heads), *[None] * self.is_last]
        self._first_state = first_state(size).to(device)
        self._graph: StageGraph | None = None
        self.busy_since: float | None = None
        """The time at which the micro-batch came that it is at."""

    @property
    def resizable(self) -> Addresses:
        """Memory that its graph reads and that a layer may resize."""
        return {} if self._graph is None else self._graph.resizable

    @property
    def takes(self) -> tuple[Tensor, ...]:
        """Tensors of the shapes that it takes, on the meta device: of the first stage something that does not count."""
        if self.is_first:
            return (torch.empty(self.size, device="meta"),)
        return (self._state_like, *wires_like(self._segments[0].takes, "meta"))

    @property
    def hands(self) -> tuple[Tensor, ...]:
        """The same of what it returns; of the last stage what PyTorch's schedules want, which collect something."""
        if self.is_last:
            return (torch.empty(1, device="meta"),)
        return (self._state_like, *wires_like(self._segments[-1].hands, "meta"))

    @property
    def _state_like(self) -> Tensor:
        return torch.empty(self.size, len(STATE), dtype=torch.int64, device="meta")

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
            self._graph = StageGraph(
                self._compute, self.modules_run, rules, self._cut.trunk, self._first_state, example
            )

    def compute_alone(self, taken: Sequence[Tensor]) -> None:
        """Compute for a micro-batch and wait for the end; what comes out of it goes nowhere."""
        under_way = self.computed(None, taken).under_way
        if under_way is not None:
            under_way.done.synchronize()

    def take_rules(self, rules: Sequence[Sequence[float]]) -> None:
        """Take over the rules of the first rank's network; see :attr:`ExitRule.numbers`."""
        for index, rule in enumerate(self._rules, self.first_exit):
            if rule is not None and rule.numbers != tuple(rules[index]):
                rule.set_extra_state(torch.tensor(rules[index], dtype=torch.float64))

    def refresh(self, network: EarlyExitNetwork) -> None:
        """Take over parameters and buffers of a network where the stage has copies, folded ones and those elsewhere."""
        now = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        holders = (
            [segment.module for segment in self._segments] if self._cut.network is network else [self._cut.network]
        )
        own = [named for each in holders for named in (*each.named_parameters(), *each.named_buffers())]
        copies = [(mine, now.get(name.removeprefix(NETWORK), mine)) for name, mine in own]
        copies = [(mine, source) for mine, source in copies if source.data_ptr() != mine.data_ptr()]
        if copies:
            with torch.no_grad(), ordered_write(self._cut.trunk.module, [mine for mine, _ in copies]):
                for mine, source in copies:
                    mine.copy_(source)
        self._cut.trunk.refresh()
        for head, source_head in zip(self._heads, network.exit_heads[self.first_exit :], strict=False):
            if head is not source_head:
                head.load_state_dict(source_head.state_dict())

    def begin(self, request: RequestPart) -> None:
        """Begin a request, or a part of one; the first stage begins to compute."""
        self._request, self._coming = request, iter(range(request.first, request.end, self.size))
        self._to_hand_on: deque[Computed] = deque()
        self._to_settle: deque[tuple[int, Computed]] = deque()
        if self.is_first:
            with self._busy():
                self._compute_next()

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Begin to compute for a micro-batch, and hand one on.

        What is given to the first stage does not count.
        """
        with self._busy():
            if self.is_first:
                self._compute_next()
            else:
                self._compute_for(next(self._coming), *given)
            while self._to_settle and self._to_settle[0][1].is_done:
                self._answer_next()
            begun = self._to_hand_on.popleft()
            if self.is_last:
                return (torch.empty(1, device=self.device),)
            if begun.under_way is not None:
                begun.under_way.done.wait()  # the current stream, which hands on
            return begun.handed

    def _compute_next(self) -> None:
        """Begin to compute for the next samples of the request, if there are any."""
        first = next(self._coming, None)
        if first is not None:
            assert self._request.x is not None
            self._compute_for(first, None, self._request.x[first : min(first + self.size, self._request.end)])

    def _compute_for(self, first: int, state: Tensor | None, *taken: Tensor) -> None:
        """Begin to compute for the micro-batch whose first sample has this place in the request."""
        begun = self.computed(state, taken)
        self._to_hand_on.append(begun)
        self._to_settle.append((first, begun))

    def finish(self) -> Answers | None:
        """End a request: wait for all answers that are left, and return the last ones instead of calling ``answer``."""
        with self._busy():
            while len(self._to_settle) > 1:
                self._answer_next()
            return self._settle_next() if self._to_settle else None

    def _answer_next(self) -> None:
        answers = self._settle_next()
        if len(answers):
            self._request.answer(answers)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self.busy_since = time.monotonic()
        try:
            with torch.no_grad():
                yield
        except Exception as error:  # whatever layers of the user's raise
            raise StageFailed(f"{self.name}: {type(error).__name__}: {error}") from error
        finally:
            self.busy_since = None

    def computed(self, state: Tensor | None, taken: Sequence[Tensor]) -> Computed:
        """Begin to compute for a micro-batch, by its graph if it has one; see :class:`StageGraph`."""
        if self._graph is not None:
            return self._graph(state, taken)
        said, handed = self._compute(self._first_state if state is None else state, [self._filled(x) for x in taken])
        return Computed(said, handed)

    def _settle_next(self) -> Answers:
        """Return the answers of the first micro-batch under way; waits for the device until it has computed them."""
        first, begun = self._to_settle.popleft()
        if begun.under_way is not None:
            self.busy_since = None  # what comes is the stage's before, and the link's
            begun.under_way.begun.synchronize()
            self.busy_since = time.monotonic()
            begun.under_way.done.synchronize()
        return settle(first, min(self.size, self._request.end - first), begun.said)

    def _filled(self, x: Tensor) -> Tensor:
        """Return a micro-batch with its first sample again for each that it lacks."""
        missing = self.size - len(x) if self.is_first else 0
        return torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) if missing else x

    def _compute(
        self, state: Tensor, taken: Sequence[Tensor], side: torch.cuda.Stream | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the exits say, and what is handed over, as it is sent.

        All exits but the last run on the side stream, if there is one, beside the segments behind them.
        """
        handed = (
            taken
            if self.is_first
            else [from_wire(x, like) for x, like in zip(taken, self._segments[0].takes, strict=True)]
        )
        said = ExitDecisions(state, self._cut.form.dtype, with_probs=self._cut.form.with_probs)
        read_beside = []  # kept until the streams have come together: its memory is this stream's
        for index, segment in enumerate(self._segments[:-1]):
            read, *handed = segment.module(*handed)
            read_beside.append(read)
            with beside(side):
                said.add(self._heads[index](read), self._rules[index], self.first_exit + index)
        read, *handed = self._segments[-1].module(*handed)
        if side is not None and read_beside:
            torch.cuda.current_stream(self.device).wait_stream(side)
        of_last = decide(read, 1.0, 1.0) if self.is_last else self._heads[-1](read)
        said.add(of_last, self._rules[-1], self.first_exit + len(self._segments) - 1)
        answers, state = said.result()
        if self.is_last:
            return answers, ()
        return answers, (state, *(to_wire(x, like) for x, like in zip(handed, self._segments[-1].hands, strict=True)))

    def close(self) -> None:
        """Free its graph."""
        if self._graph is not None:
            self._graph.close()
