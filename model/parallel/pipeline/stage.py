"""``Stage``: the part of a network that one rank runs, micro-batch by micro-batch, in PyTorch's ``PipelineStage``."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from ....kernels import decide
from ...runners.captured_network import Addresses
from ..cut import Placed
from .answers import AnswerForm, Decisions
from .stage_graph import StageGraph, UnderWay
from .wire import Wire


class StageFailed(Exception):
    """What a stage's layers or heads raised, with the stage and the place where it runs."""


class Stage(nn.Module):
    """Placed segments with their exits.

    It takes and returns bytes (see :class:`Wire`), as many each time: what PyTorch's schedules want. The first stage
    finds its samples in the request. A micro-batch is handed on as it is, with answered samples in it, so that the host
    waits for nothing: it is ahead of the devices all the time.
    """

    def __init__(
        self, placed: Placed, form: AnswerForm, takes: Wire | None, hands: Wire, x: Tensor, size: int, name: str
    ) -> None:
        """Run segments on a device, from a graph if it has them.

        Args:
            placed: the segments.
            form: of the network's answers.
            takes: how micro-batches come; None: the first stage takes samples of the request.
            hands: how they go.
            x: what the segments take, on the device.
            size: samples of a micro-batch.
            name: for errors.
        """
        super().__init__()
        self.modules_run = placed.modules
        self.size, self.device, self.name = size, x.device, name
        self._placed, self.form, self._takes, self._hands = placed, form, takes, hands
        self._nothing_said = form.nothing_said(size, self.device)
        self._rules = [head.rule for head in placed.heads]
        self.takes = torch.empty(size, device="meta") if takes is None else takes.empty("meta")
        """A tensor like what it takes, on ``meta``: of the first stage something that does not count."""
        self.hands = hands.empty("meta")
        """The same of what it returns."""
        self.busy_since: float | None = None
        """The time at which the micro-batch came that it is at."""
        self._example = x
        if takes is not None:
            self._example = self._packed(takes, [self._nothing_said, x])
        self._graph: StageGraph | None = None
        self.capture()

    @property
    def is_first(self) -> bool:
        """Whether it takes samples of the request."""
        return self._takes is None

    @property
    def notes(self) -> Sequence[str]:
        """What was done to the backbone here."""
        return self._placed.trunk.notes

    @property
    def resizable(self) -> Addresses:
        """Memory that its graph reads and that a layer may resize."""
        return {} if self._graph is None else self._graph.resizable

    def capture(self) -> None:
        """Capture its computation, anew if it was before, where its device has graphs."""
        if self.device.type == "cuda":
            self.close()
            given = self.modules_run, self._rules, self._placed.trunk, self._example, self._hands, self.size
            self._graph = StageGraph(self._compute, *given)

    def take_rules(self, rules: Sequence[Sequence[float]]) -> None:
        """Take over the rules of the first rank's network; see :attr:`ExitRule.numbers`."""
        for rule, numbers in zip(self._rules, rules[self._placed.first_exit :], strict=False):
            if rule.numbers != tuple(numbers):
                rule.set_extra_state(torch.tensor(numbers, dtype=torch.float64))

    def refresh(self) -> None:
        """Fold weights again that were changed in place."""
        self._placed.trunk.refresh()

    def begin(self, x: Tensor | None) -> None:
        """Begin a request, or a part of one: its samples, where this is the first stage."""
        self._coming = iter(() if x is None else x.split(self.size))
        self._under_way: list[UnderWay] = []
        self._sent: list[Tensor] = []

    def forward(self, given: Tensor) -> Tensor:
        """Begin to compute for a micro-batch; what is given to the first stage does not count."""
        with self._busy():
            taken = next(self._coming) if self.is_first else given
            if self._graph is None:
                handed = self._packed(self._hands, self._compute(self._filled(taken) if self.is_first else taken))
            else:
                self._under_way.append(self._graph(taken))
                handed = self._under_way[-1].handed
                self._under_way[-1].done.wait()  # the current stream, which hands on
            self._sent.append(handed)
            return handed

    def said(self) -> Tensor:
        """Return what was said of all micro-batches so far, on the current stream."""
        return self._hands.said_in(self._sent)

    def finish(self) -> None:
        """Let the host wait until all of a request is computed here."""
        with self._busy():
            for each in self._under_way:
                self.busy_since = None  # what comes is the stage's before, and the link's
                each.begun.synchronize()
                self.busy_since = time.monotonic()
                each.done.synchronize()

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

    def _filled(self, x: Tensor) -> Tensor:
        """Return a micro-batch with its first sample again for each that it lacks."""
        missing = self.size - len(x)
        return torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) if missing else x

    @staticmethod
    def _packed(wire: Wire, given: Sequence[Tensor]) -> Tensor:
        packed = wire.empty(given[0].device)
        for into, each in zip(wire.views(packed), given, strict=True):
            into.copy_(each)
        return packed

    def _compute(self, taken: Tensor, side: torch.cuda.Stream | None = None) -> Sequence[Tensor]:
        """Return what the exits say, and the activation as it is sent.

        All exits but the last run on the side stream, if there is one, beside the segments behind them.
        """
        said, x = (self._nothing_said, taken) if self._takes is None else self._takes.views(taken)
        decisions, placed, kept = Decisions(said, self.form), self._placed, list[Tensor]()

        def on_tap(index: int, features: Tensor) -> None:
            kept.append(features)  # until the streams have come together: its memory is this stream's
            if side is not None:
                side.wait_stream(torch.cuda.current_stream(self.device))
            with nullcontext() if side is None else torch.cuda.stream(side):
                decisions.add(placed.heads[index](features), self._rules[index], placed.first_exit + index)

        output = placed.run(x, on_tap)
        if side is not None and kept:
            torch.cuda.current_stream(self.device).wait_stream(side)
        if placed.is_last:
            decisions.add(decide(output, 1.0, 1.0), None, placed.first_exit + len(placed.heads))
            return [decisions.result()]
        return [decisions.result(), self._hands.dense(output)]

    def close(self) -> None:
        """Free its graph."""
        if self._graph is not None:
            self._graph.close()
