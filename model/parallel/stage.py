"""``Stage``: the part of a network that one rank runs, micro-batch by micro-batch, in PyTorch's ``PipelineStage``."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...kernels import HeadOutput, decide
from ..early_exit_network import EarlyExitNetwork
from ..rule_order import ordered_write
from .answered import AnswerForm, said_by, settle
from .segments import NETWORK, Cut, from_wire, to_wire, wires_like
from .stage_graph import Computed, StageGraph
from .survivors import ROW, Merging, Outlet, Passing, Rows, empty_rows

#: Steps of a schedule by which what a stage hands on comes later than what it took: see ``Stage``.
LAG = 1


class StageFailed(Exception):
    """What a stage's layers or heads raised, with the stage and the place where it runs."""


class Stage(nn.Module):
    """Consecutive segments, their heads, and the outlet to the next stage.

    It takes and returns rows (see ``ROW``) and activations, of one size: what PyTorch's schedules want. The first stage
    takes the places of samples alone, and finds them in the request. Nothing is computed for a micro-batch without a
    sample in use.

    At each step the stage begins to compute for the micro-batch that came, and then hands on the one before, whose
    answers the host reads meanwhile: it waits for a device only where another micro-batch keeps that busy.
    """

    def __init__(
        self,
        cut: Cut,
        start: int,
        end: int,
        size: int,
        device: torch.device,
        *,
        merges: bool,
        name: str,
    ) -> None:
        """Run segments for micro-batches of a size.

        Args:
            cut: of the network.
            start: the first of the segments, and so of the exits.
            end: the one after the last.
            size: of micro-batches.
            device: of all this.
            merges: hand on open samples alone.
            name: for errors.
        """
        super().__init__()
        segments, heads = cut.segments[start:end], cut.heads[start:end]
        self.modules_run = nn.ModuleList([*(segment.module for segment in segments), *heads])
        self.first_exit, self.size, self.device, self.name = start, size, device, name
        self._cut, self._segments, self._heads = cut, segments, heads
        self._rules = [*(head.rule for head in heads), *([None] if len(heads) < len(segments) else [])]
        wires = wires_like(segments[-1].hands, device)
        self.outlet: Outlet = Merging(size, wires) if merges else Passing(size, wires)
        self._first_state = torch.from_numpy(empty_rows(size)[:, 1:]).to(device)
        self._graph: StageGraph | None = None
        self.begin(lambda _: None, None, 0)
        self.busy_since: float | None = None
        """The time at which the micro-batch came that it is at."""

    @property
    def form(self) -> AnswerForm:
        """The form of answers."""
        return self._cut.form

    @property
    def is_first(self) -> bool:
        """Whether it takes samples of the request."""
        return self.first_exit == 0

    @property
    def takes(self) -> tuple[Tensor, ...]:
        """Tensors of the shapes that it takes, on the meta device."""
        if self.is_first:
            return (torch.empty(self.size, dtype=torch.int64, device="meta"),)
        return (self._rows_like, *wires_like(self._segments[0].takes, "meta"))

    @property
    def hands(self) -> tuple[Tensor, ...]:
        """The same of what it returns."""
        return (self._rows_like, *wires_like(self._segments[-1].hands, "meta"))

    @property
    def _rows_like(self) -> Tensor:
        return torch.empty(self.size, len(ROW), dtype=torch.int64, device="meta")

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
        done = self.computed(None, taken).done
        if done is not None:
            done.synchronize()

    def take_rules(self, states: Tensor) -> None:
        """Take over the rules of the first rank's network, [heads, 4]; see :meth:`ExitRule.get_extra_state`."""
        for index, rule in enumerate(self._rules, self.first_exit):
            if rule is not None and not torch.equal(rule.get_extra_state(), states[index]):
                rule.set_extra_state(states[index])

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

    def begin(self, answer: Callable[[Tensor], None], x: Tensor | None, last: int) -> None:
        """Begin a request.

        Args:
            answer: called with answers (see ``COLUMNS``) as soon as there are some.
            x: the request, where this is the first stage.
            last: the number of the micro-batch, from 0, after which only empty ones come.
        """
        self._answer, self._x, self._last, self._step = answer, x, last, 0
        self._under_way: tuple[Rows, Computed] | None = None

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Begin to answer for a micro-batch, and hand on the one before."""
        # On a GPU this waits for them to come, which is no fault of this stage, and not for the micro-batch before.
        came = given[0].cpu().numpy()
        with self._busy():
            return self._forward(came, *given)

    def _forward(self, came: NDArray[np.int64], rows: Tensor, *wires: Tensor) -> tuple[Tensor, ...]:
        if self.is_first:
            places, came = came, empty_rows(len(came))
            came[:, 0] = places
        before, self._under_way = self._under_way, None
        if (came[:, 0] >= 0).any():
            begun = (
                self.computed(None, [self._samples(came[:, 0])]) if self.is_first else self.computed(rows[:, 1:], wires)
            )
            self._under_way = came, begun
        left, handed = self._settled(before)
        left, wires_out = self.outlet.hand_on(left, handed, last=self._step >= self._last + LAG)
        self._step += 1
        return torch.from_numpy(left).to(self.device, non_blocking=True), *wires_out

    def finish(self) -> None:
        """End a request: answer for what the last step has begun."""
        with self._busy():
            before, self._under_way = self._under_way, None
            self._settled(before)

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

    def _settled(self, begun: tuple[Rows, Computed] | None) -> tuple[Rows, Sequence[Tensor] | None]:
        """Send the answers of a micro-batch; returns the rows that stay open, with activations if there are any."""
        if begun is None:
            return empty_rows(self.size), None
        rows, computed = begun
        if computed.done is not None:
            computed.done.synchronize()
            computed.done.wait()  # the current stream, which hands on, and allows what was taken to be overwritten
        answers, left = settle(rows, computed.said)
        if len(answers):
            self._answer(answers)
        return left, computed.handed if (left[:, 0] >= 0).any() else None

    def _samples(self, places: NDArray[np.int64]) -> Tensor:
        """Return the samples of the request at places, which follow each other; none for empty rows, behind them."""
        assert self._x is not None
        first = int(places[0])
        return self._x[first : first + int((places >= 0).sum())]

    def _filled(self, x: Tensor) -> Tensor:
        """Return a micro-batch with its first sample again for each that it lacks."""
        missing = self.size - len(x) if self.is_first else 0
        return torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) if missing else x

    def _compute(self, state: Tensor, taken: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the exits say, see ``SAID``, and what is handed over, as it is sent."""
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
        dtype, with_probs = self._cut.form.dtype, self._cut.form.with_probs
        return said_by(said, self._rules, self.first_exit, state, dtype, with_probs=with_probs), wires

    def close(self) -> None:
        """Free its graph."""
        if self._graph is not None:
            self._graph.close()
