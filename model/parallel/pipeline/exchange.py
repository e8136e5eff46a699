"""``Exchange``: a stage among the others: PyTorch's ``ScheduleGPipe``, announcements before it, answers behind it.

The schedule sends what is said of samples, and activations, from stage to stage; the last one sends what was said in
the end to the first. The announcement of a request, with the rules in force, goes from the first rank's host to all,
by gloo.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ...network.early_exit_network import EarlyExitNetwork
from .answers import all_answered
from .stage import Stage, StageFailed

#: A rank waits for a request as long as the first one lives.
_FOR_EVER = timedelta(days=3650)
#: Micro-batches that go through a schedule at once: it keeps memory for what each receives and sends.
_MOST_MICRO_BATCHES = 64
#: Sent in place of a number of samples: that was all.
_NO_MORE = -1


class Exchange:
    """What a rank sends and receives in a request. All of it may wait for other ranks, and not return if one dies."""

    def __init__(
        self, stage: Stage, index: int, stages: int, heads: int, host: dist.ProcessGroup, activations: dist.ProcessGroup
    ) -> None:
        """Exchange for the stage of an index, which is the rank, of so many, of a network with so many heads.

        Announcements go by the group ``host``, of gloo; all else by one of the devices.
        """
        self.stage, self.index = stage, index
        self._stages, self._heads, self._host, self._activations = stages, heads, host, activations
        self._schedule: tuple[int, ScheduleGPipe] | None = None

    def ask(self, network: EarlyExitNetwork, x: Tensor, early: "Future[Tensor]") -> Tensor:
        """Announce a request to all, with the rules, and run the first stage for it; returns what is said in the end.

        If that stage answers for all samples, ``early`` gets it as soon as it is there: the stages behind are at it
        still, for nobody.
        """
        rules = [head.rule.numbers for head in network.exit_heads]
        announced = self._announce(len(x), rules)
        self.stage.take_rules(rules)
        own, last, coming = list[Tensor](), list[Tensor](), list[dist.Work]()
        for said in self._run(len(x), x):
            own.append(said)
            if self._stages > 1:
                last.append(torch.empty_like(said))
                coming += self._exchanged(dist.irecv, last[-1], self._stages - 1)
        said = torch.cat(own)[: len(x)]
        if self._stages > 1:
            if all_answered(said):
                early.set_result(said)
            for work in (*coming, *announced):
                work.wait()
            said = torch.cat(last)[: len(x)]
        self._wait()
        return said

    def end(self) -> None:
        """Announce to all that no request comes any more."""
        for work in self._announce(_NO_MORE, [(0.0,) * 4] * self._heads):
            work.wait()

    def _announce(self, samples: int, rules: Sequence[Sequence[float]]) -> list[dist.Work]:
        request = torch.tensor([samples, *chain.from_iterable(rules)], dtype=torch.float64)
        return [_begun(dist.isend(request, rank, self._host)) for rank in range(1, self._stages)]

    def answer_next(self) -> bool:
        """Wait for a request, and run the stage for it; returns False if none comes."""
        request = torch.empty(1 + 4 * self._heads, dtype=torch.float64)
        _begun(dist.irecv(request, 0, self._host)).wait(_FOR_EVER)
        samples = int(request[0])
        if samples == _NO_MORE:
            return False
        self.stage.take_rules(request[1:].view(-1, 4).tolist())
        for said in self._run(samples, None):
            if self.index == self._stages - 1:
                for work in self._exchanged(dist.isend, said, 0):
                    work.wait()
        self._wait()
        return True

    def _exchanged(self, how: Callable[..., Any], said: Tensor, rank: int) -> list[dist.Work]:
        """Begin to send or receive what was said, in a batch, for which NCCL needs no further communicator."""
        return dist.batch_isend_irecv([dist.P2POp(how, said, rank, self._activations)])

    def _run(self, samples: int, x: Tensor | None) -> Iterator[Tensor]:
        """Run the stage for all micro-batches of a request; yields what it says of as many as go at once."""
        size, most = self.stage.size, _MOST_MICRO_BATCHES * self.stage.size
        for first in range(0, samples, most):
            end = min(samples, first + most)
            self.stage.begin(None if x is None else x[first:end])
            steps = -(-(end - first) // size)
            try:
                self._schedule_of(steps).eval(*([torch.empty(steps * size)] if self.index == 0 else []))
            except RuntimeError as error:  # PyTorch's, around what the stage raised
                if isinstance(error.__cause__, StageFailed):
                    raise error.__cause__ from error.__cause__.__cause__
                raise
            yield self.stage.said()
            self.stage.finish()

    def _wait(self) -> None:
        """Let the host wait until the device has sent and received all."""
        if self.stage.device.type == "cuda":
            torch.cuda.current_stream(self.stage.device).synchronize()

    def _schedule_of(self, steps: int) -> ScheduleGPipe:
        """Return PyTorch's schedule of so many micro-batches, with memory for them; of one number it is kept."""
        if self._schedule is None or self._schedule[0] != steps:
            self._schedule = None
            stage = PipelineStage(
                self.stage, self.index, self._stages, self.stage.device, self.stage.takes, self.stage.hands,
                group=self._activations,
            )  # fmt: skip
            self._schedule = steps, ScheduleGPipe(stage, steps)
        return self._schedule[1]


def _begun(work: dist.Work | None) -> dist.Work:
    """Return what was begun, which is None on ranks outside of the group alone."""
    assert work is not None
    return work
