"""A network taken apart in CUDA graphs: its bare trunk, its heads alone, and both as the overlapped runner has them."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial
from typing import cast

import torch

from ...kernels import ExitBuffers
from ...model.runners.overlapped import OverlappedRunner
from ..bench.variants import Workshop, bare_name, catalogue
from ..heads.alone import Chain
from ..heads.captured_launches import head_launches
from ..heads.in_situ import HeadsInSitu
from ..measuring.cells import NEVER
from ..measuring.peers import Graph, HeadSaid
from ..measuring.subject import Subject

#: The trunk that everything is captured with.
TRUNK_KIND = "cudnn"
#: The parts.
BARE, HEADS, BOTH = "trunk", "heads", "both"


class WrongAnswer(RuntimeError):
    """A capture does not answer as it should, so that it is not timed."""


class Parts(HeadsInSitu):
    """A subject whose parts are captured, each time afresh; all of them answer rightly.

    Heads are launched as the project chooses, by the device's tuned table where it has one.
    """

    def __init__(self, subject: Subject, opened: ExitStack) -> None:
        """Capture on the subject's device; what was captured is freed when ``opened`` closes."""
        super().__init__(subject, TRUNK_KIND)
        self._opened = opened
        self.capture: dict[str, Callable[[], Callable[[], object]]] = {
            BARE: self._bare,
            HEADS: self._heads_alone,
            BOTH: self._both,
        }
        """By part, what captures it and returns what replays it: of ``HEADS`` ``alone_head.CHAIN`` times."""

    @property
    def trunk_notes(self) -> tuple[str, ...]:
        """In sentences, what was done to the backbone."""
        return self._trunk.notes

    @cached_property
    def forks(self) -> tuple[str, ...]:
        """Taps after which launches leave the trunk, the same ones in all captures."""
        example = self.subject.example
        with OverlappedRunner(self._network, example, batch_sizes=(len(example),), trunk=self._trunk) as runner:
            return runner.forks[len(example)]

    def _bare(self) -> Callable[[], object]:
        """The trunk with its classifier, as the benchmark captures it."""
        return partial(self.bare_graph(), self.subject.example)

    def bare_graph(self) -> Graph:
        """Capture the trunk with its classifier, as the benchmark does: on a stream of high priority."""
        workshop = Workshop(self.subject, trunks={TRUNK_KIND: self._trunk})
        (variant,) = (one for one in catalogue(self.subject.cell) if one.name == bare_name(TRUNK_KIND))
        captured = variant.build(workshop, NEVER)
        _check(BARE, self.wrong((), lambda x: captured.answer(captured.call(x))))
        return cast(Graph, captured.call)

    def _both(self) -> Callable[[], object]:
        example = self.subject.example
        runner = OverlappedRunner(
            self._network, example, batch_sizes=(len(example),), trunk=self._trunk, forks=self.forks
        )
        self._opened.callback(runner.close)
        _check(BOTH, self.wrong(self._network.taps, runner))
        return partial(runner, example)

    def _heads_alone(self) -> Callable[[], object]:
        """The runner's launches of heads one after another on one stream; those with the classifier without it."""
        heads, features = [head.as_exit_head() for head in self.subject.heads], self._features
        example, classes = self.subject.example, self.subject.heads[0].num_classes
        buffers = ExitBuffers.allocate(
            len(heads) + 1, len(example), classes, device=example.device,
            with_probs=all(head.return_probs for head in self.subject.heads),
        )  # fmt: skip
        ends = [self._network.taps.index(fork) for fork in self.forks]
        launches = head_launches(buffers, heads, ends)

        def launch() -> list[HeadSaid]:
            for part, one in launches:
                one(features[part])
            said = (buffers.label, buffers.confidence, buffers.exits)
            return [HeadSaid(*of_place) for of_place in zip(*said, strict=True)][: len(heads)]

        torch.cuda.synchronize(example.device)  # buffers and counters are zero before another stream uses them
        chain = Chain(launch, example.device)
        chain()
        for head, said in zip(self.heads, chain.answer, strict=True):
            _check(HEADS, head.wrong_answer(said))
        return chain


def _check(part: str, wrong: str | None) -> None:
    if wrong is not None:
        raise WrongAnswer(f"{part}: {wrong}; not timed")
