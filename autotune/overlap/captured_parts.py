"""Captures a network's parts as CUDA graphs: its trunk alone, its heads alone, and both as in the overlapped runner."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property, partial

import torch

from ...kernels import ExitBuffers
from ...model.runners.overlapped import OverlappedRunner
from ..bench.variants import VariantCaptures, bare_name, catalogue
from ..heads.alone import Chain, head_launches
from ..heads.in_situ import HeadsInSitu
from ..measuring.cells import NEVER
from ..measuring.peers import HeadAnswer
from ..measuring.subject import Subject

#: The trunk that everything is captured with.
TRUNK_KIND = "cudnn"
#: The parts.
BARE, HEADS, BOTH = "trunk", "heads", "both"


class WrongAnswer(RuntimeError):
    """A capture answers wrongly, so that it is not timed."""


class CapturedParts(HeadsInSitu):
    """A subject whose parts are captured, each time afresh, and checked.

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
        """By part a function that captures it and returns its replay; that of ``HEADS`` runs ``CHAIN`` times."""

    @property
    def trunk_notes(self) -> tuple[str, ...]:
        """Changes made to the backbone, in sentences."""
        return self._trunk.notes

    @cached_property
    def forks(self) -> tuple[str, ...]:
        """Taps after which launches leave the trunk, the same ones in all captures."""
        example = self.subject.example
        with OverlappedRunner(self._network, example, batch_sizes=(len(example),), trunk=self._trunk) as runner:
            return runner.forks[len(example)]

    def _bare(self) -> Callable[[], object]:
        """Capture the trunk with its classifier, as the benchmark does: on a stream of high priority."""
        captures = VariantCaptures(self.subject, trunks={TRUNK_KIND: self._trunk})
        (variant,) = (one for one in catalogue(self.subject.cell) if one.name == bare_name(TRUNK_KIND))
        captured = variant.build(captures, NEVER)
        check(BARE, self.wrong((), captured.answer_to))
        return partial(captured.call, self.subject.example)

    def _both(self) -> Callable[[], object]:
        example = self.subject.example
        sizes = (len(example),)
        runner = OverlappedRunner(self._network, example, batch_sizes=sizes, trunk=self._trunk, forks=self.forks)
        self._opened.callback(runner.close)
        check(BOTH, self.wrong(self._network.taps, runner))
        return partial(runner, example)

    def _heads_alone(self) -> Callable[[], object]:
        """Capture the runner's head launches one after another on one stream, without the network's classifier."""
        heads, features = [one.head.as_exit_head() for one in self.heads], [one.x for one in self.heads]
        example, classes = self.subject.example, self.subject.heads[0].num_classes
        buffers = ExitBuffers.allocate(
            len(heads) + 1, len(example), classes, device=example.device,
            with_probs=all(head.return_probs for head in self.subject.heads),
        )  # fmt: skip
        ends = [self._network.taps.index(fork) for fork in self.forks]
        launches = head_launches(buffers, heads, ends)

        def launch() -> list[HeadAnswer]:
            for part, one in launches:
                one(features[part])
            answers = zip(buffers.label, buffers.confidence, buffers.exits, strict=True)
            return [HeadAnswer(*answer) for answer in answers][: len(heads)]

        torch.cuda.synchronize(example.device)  # buffers and counters are zero before another stream uses them
        chain = Chain(launch, example.device)
        chain()
        for head, answer in zip(self.heads, chain.answer, strict=True):
            check(HEADS, head.wrong_answer(answer))
        return chain


def check(name: str, wrong: str | None) -> None:
    """Raise ``WrongAnswer`` if anything is wrong, in words, with what is called ``name``."""
    if wrong is not None:
        raise WrongAnswer(f"{name}: {wrong}; not timed")
