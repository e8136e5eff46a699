"""``Exchange``: a stage among the others: PyTorch's ``ScheduleGPipe``, announcements before it and answers beside it.

The schedule sends the state of samples and activations from stage to stage. From host to host, by gloo, go: the
announcement of a request, with the rules in force, from the first rank to all; and answers from each stage to the first
rank, as soon as they are there.
"""

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ...network.early_exit_network import EarlyExitNetwork
from .answered import Answers
from .stage import RequestPart, Stage, StageFailed

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

        Announcements and answers go by the group ``host``, of gloo; states and activations by one of the devices.
        """
        self.stage, self.index, self.form = stage, index, stage.form
        self._stages, self._heads, self._host, self._activations = stages, heads, host, activations
        self._schedule: tuple[int, ScheduleGPipe] | None = None
        self._sent: list[tuple[dist.Work, Tensor]] = []
        # Requests whose answers this rank has sent, and heard: one that is answered may be under way while the next is.
        self._answered = self._heard = 0

    def ask(self, network: EarlyExitNetwork, x: Tensor, samples: int, answer: Callable[[Answers], None]) -> None:
        """Run the first stage for a request, and once it is at it announce the request to all, with the rules."""
        rules = [head.rule.numbers for head in network.exit_heads]
        self.stage.take_rules(rules)
        last = self._run(samples, answer, x, lambda: self._announce(samples, rules))
        if last is not None:
            answer(last)
        self._wait_for_sent()

    def end(self) -> None:
        """Announce to all that no request comes any more."""
        self._announce(_NO_MORE, [(0.0,) * 4] * self._heads)
        self._wait_for_sent()

    def _announce(self, samples: int, rules: Sequence[Sequence[float]]) -> None:
        request = torch.tensor([samples, *chain.from_iterable(rules)], dtype=torch.float64)
        for rank in range(1, self._stages):
            self._send(request, rank)

    def answer_next(self) -> bool:
        """Wait for a request, run the stage for it, and send answers as they come; returns False if none comes."""
        request = torch.empty(1 + 4 * self._heads, dtype=torch.float64)
        announcement = dist.irecv(request, 0, self._host)
        assert announcement is not None
        announcement.wait(_FOR_EVER)
        if int(request[0]) == _NO_MORE:
            return False
        self.stage.take_rules(request[1:].view(-1, 4).tolist())
        self._say(self._run(int(request[0]), self._say), last=True)
        self._answered += 1
        self._wait_for_sent()
        return True

    def _send(self, tensor: Tensor, rank: int, tag: int = 0) -> None:
        """Begin to send, from the host."""
        work = dist.isend(tensor, rank, self._host, tag)
        assert work is not None
        self._sent.append((work, tensor))

    def _say(self, answers: Answers | None, *, last: bool = False) -> None:
        """Send answers of a micro-batch to the first rank, and whether the stage has no more, in one tensor."""
        message = torch.zeros(1 + self.stage.size, self.form.width, dtype=self.form.dtype)
        if answers is not None:
            message.numpy()[1 : 1 + len(answers)] = answers
        message[0, 0], message[0, 1] = 0 if answers is None else len(answers), last
        self._send(message, 0, _tag(self._answered))

    def _wait_for_sent(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def hear(self, answer: Callable[[Answers], None]) -> None:
        """Receive the answers of all other stages to the next request, in the order in which they come."""
        speaking = self._stages - 1
        while speaking:
            message = torch.empty(1 + self.stage.size, self.form.width, dtype=self.form.dtype)
            dist.recv(message, None, self._host, _tag(self._heard))
            said = message.numpy()
            count, last = map(int, said[0, :2])
            if count:
                answer(said[1 : 1 + count])
            speaking -= last
        self._heard += 1

    def _run(
        self,
        samples: int,
        answer: Callable[[Answers], None],
        x: Tensor | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> Answers | None:
        """Run the stage for all micro-batches of a request; returns the last answers, if there are any left.

        ``begun`` is called once the first stage has begun to compute.
        """
        last_answers = None
        size, most = self.stage.size, _MOST_MICRO_BATCHES * self.stage.size
        for first in range(0, samples, most):
            if last_answers is not None:
                answer(last_answers)
            end = min(samples, first + most)
            self.stage.begin(RequestPart(first, end, answer, x))
            if first == 0:
                begun()
            steps = -(-(end - first) // size)
            try:
                self._schedule_of(steps).eval(*([torch.empty(steps * size)] if self.index == 0 else []))
            except RuntimeError as error:  # PyTorch's, around what the stage raised
                if isinstance(error.__cause__, StageFailed):
                    raise error.__cause__ from error.__cause__.__cause__
                raise
            last_answers = self.stage.finish()
        return last_answers

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


def _tag(request: int) -> int:
    """Return what messages with answers to a request are marked with."""
    return 1 + request % 1024


class Worker:
    """Runs what it is given, one after another.

    It is no executor of ``concurrent.futures``: Python waits for the threads of those when it ends, and one may be
    waiting for a process that has died.
    """

    def __init__(self, name: str) -> None:
        """Start the thread, under a name for people."""
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        """Run a function there; the future gets what it returns or raises."""
        future: Future[Any] = Future()
        self._work.put((function, future))
        return future

    def end(self) -> None:
        """End the thread once it has done what it was given; does not wait."""
        self._work.put(None)

    def leave_behind(self) -> None:
        """Let the process end, by ``os._exit``, without a thread that has been ended and still waits.

        Python's own end would let it come back to an interpreter that is none, which aborts the process.
        """
        if self._thread.is_alive():
            atexit.register(self._exit_beside)

    def _exit_beside(self) -> None:
        if self._thread.is_alive():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            function, future = given
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del given, function, future  # an answer of the user's, while it waits for the next
