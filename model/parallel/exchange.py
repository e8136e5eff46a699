"""``Exchange``: a stage among the others: PyTorch's ``ScheduleGPipe``, announcements before it and answers beside it.

The schedule sends rows and activations from stage to stage. By gloo go the announcement of a request, with the rules
in force, from the first rank to all, and answers from each stage to the first rank, as soon as they are there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ..early_exit_network import EarlyExitNetwork
from .stage import Stage, StageFailed

#: A rank waits for a request as long as the first one lives.
_FOR_EVER = timedelta(days=3650)
#: Micro-batches that go through a schedule at once: it keeps memory for what each receives and sends.
_MOST_MICRO_BATCHES = 64
#: Sent in place of a number of answers, or of samples: that was all.
_NO_MORE = -1


class Connection(NamedTuple):
    """The process groups of a pipeline."""

    activations: dist.ProcessGroup
    """For rows and activations; of the backend for the stages' devices."""
    answers: dist.ProcessGroup
    """For announcements and answers, by gloo."""


class Exchange:
    """What a rank sends and receives in a request. All of it may wait for other ranks, and not return if one dies."""

    def __init__(
        self,
        stage: Stage,
        index: int,
        stages: int,
        heads: int,
        extra_steps: Sequence[int],
        connection: Connection,
    ) -> None:
        """Exchange for a stage.

        Args:
            stage: of this rank.
            index: of the stage, and the rank.
            stages: how many there are.
            heads: how many the network has.
            extra_steps: of each stage but the last.
            connection: to the others.
        """
        self.stage, self.index, self.form = stage, index, stage.form
        self._stages, self._heads, self._extra_steps, self._connection = stages, heads, extra_steps, connection
        self._schedule: tuple[int, ScheduleGPipe] | None = None

    def ask(self, network: EarlyExitNetwork, x: Tensor, samples: int, answer: Callable[[Tensor], None]) -> None:
        """Announce a request to all, with the network's rules, and run the first stage for it."""
        rules = torch.stack([head.rule.get_extra_state() for head in network.exit_heads])
        with self._announced(samples, rules):
            self.stage.take_rules(rules)
            self._run(samples, answer, x)

    def end(self) -> None:
        """Announce to all that no request comes any more."""
        with self._announced(_NO_MORE, torch.zeros(self._heads, 4, dtype=torch.float64)):
            pass

    @contextmanager
    def _announced(self, samples: int, rules: Tensor) -> Iterator[None]:
        """Announce a request to all, who have heard of it at the end of the body."""
        request = torch.cat([torch.tensor([samples], dtype=torch.float64), rules.flatten()])
        sent = [dist.isend(request, rank, self._connection.answers) for rank in range(1, self._stages)]
        yield
        for each in sent:
            assert each is not None
            each.wait()

    def answer_next(self) -> bool:
        """Wait for a request, run the stage for it, and send answers as they come; returns False if none comes."""
        group, first = self._connection.answers, 0
        request = torch.empty(1 + 4 * self._heads, dtype=torch.float64)
        announcement = dist.irecv(request, first, group)
        assert announcement is not None
        announcement.wait(_FOR_EVER)
        if int(request[0]) == _NO_MORE:
            return False
        self.stage.take_rules(request[1:].view(-1, 4))
        sent: list[tuple[dist.Work | None, Tensor]] = []

        def send(tensor: Tensor) -> None:
            sent.append((dist.isend(tensor, first, group), tensor))

        def answer(rows: Tensor) -> None:
            send(torch.tensor([len(rows)]))
            send(rows)

        self._run(int(request[0]), answer, None)
        send(torch.tensor([_NO_MORE]))
        for work, _ in sent:
            assert work is not None
            work.wait()
        return True

    def hear(self, answer: Callable[[Tensor], None]) -> None:
        """Receive the answers of all other stages, in the order in which they come."""
        group, speaking = self._connection.answers, self._stages - 1
        while speaking:
            count = torch.empty(1, dtype=torch.int64)
            rank = dist.recv(count, None, group)
            if int(count) == _NO_MORE:
                speaking -= 1
                continue
            rows = torch.empty(int(count), self.form.width, dtype=self.form.dtype)
            dist.recv(rows, rank, group)
            answer(rows)

    def _run(self, samples: int, answer: Callable[[Tensor], None], x: Tensor | None) -> None:
        """Run the stage for all micro-batches of a request."""
        size, places = self.stage.size, torch.arange(samples)
        for part in places.split(_MOST_MICRO_BATCHES * size):
            micro_batches = -(-len(part) // size)
            steps = micro_batches + sum(self._extra_steps)
            self.stage.begin(answer, x, micro_batches - 1 + sum(self._extra_steps[: self.index]))
            rows = torch.full((steps * size,), -1)
            rows[: len(part)] = part
            try:
                self._schedule_of(steps).eval(*([rows] if self.index == 0 else []))
            except RuntimeError as error:  # PyTorch's, around what the stage raised
                if isinstance(error.__cause__, StageFailed):
                    raise error.__cause__ from error.__cause__.__cause__
                raise
            self.stage.finish()

    def _schedule_of(self, steps: int) -> ScheduleGPipe:
        """Return PyTorch's schedule of so many micro-batches, with memory for them; of one number it is kept."""
        if self._schedule is None or self._schedule[0] != steps:
            self._schedule = None
            last = self.index == self._stages - 1
            stage = PipelineStage(
                self.stage, self.index, self._stages, self.stage.device, self.stage.takes,
                self.stage.hands[:1] if last else self.stage.hands, self._connection.activations,
            )  # fmt: skip
            self._schedule = steps, ScheduleGPipe(stage, steps)
        return self._schedule[1]
