"""NetworkParts: captures of a network's trunk, of its heads and of both, as an overlapped runner does, and checked."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ...kernels import ExitBuffers, ExitLaunch, HeadOutput
from ...model import ExitResult, make_trunk
from ...model.runners.overlapped import OverlappedRunner
from ...model.runners.program import CapturedBatch, StaticInput
from ..measuring.captured import chain
from ..measuring.cells import NEVER
from ..measuring.eager_truth import Comparison, EagerTruth, wrong_in_words
from ..measuring.failures import refuse
from ..measuring.heads_alone import heads_of
from ..measuring.peers import GraphedPeer, bare, merged_answer
from ..measuring.subject import Subject

#: The trunk that everything is captured with.
TRUNK_KIND = "cudnn"
#: The parts of a network that are timed.
BARE, HEADS, BOTH = "trunk", "heads", "both"


class NetworkParts:
    """A subject whose trunk, heads and whole are captured, each time afresh, and checked.

    Heads are launched as the project chooses, by the device's tuned table where it has one.
    """

    def __init__(self, subject: Subject, opened: ExitStack) -> None:
        """Capture on the subject's device; what was captured is freed when ``opened`` closes."""
        self.subject = subject
        self._network = network = subject.network
        self.trunk = make_trunk(network.backbone, network.taps, subject.example, TRUNK_KIND, network.reading)
        """That everything is captured with."""
        self.heads = heads_of(subject, self.trunk)
        """Those of the taps, each with what its tap gives it."""
        self._opened = opened

    @property
    def protocol(self) -> dict[str, Any]:
        """Conditions of times of a network, as records keep them."""
        return {"trunk_kind": TRUNK_KIND, "forks": list(self.forks)}

    @cached_property
    def forks(self) -> tuple[str, ...]:
        """Taps after which a launch leaves the trunk, by rule: the same ones in all captures."""
        example = self.subject.example
        with _ForksByRule(self._network, example, batch_sizes=(len(example),), trunk=self.trunk) as runner:
            return runner.forks[len(example)]

    def capture(self, part: str) -> Callable[[], object]:
        """Capture a part and return its replay; that of ``HEADS`` runs ``CHAIN`` times."""
        return {BARE: self._bare, HEADS: self._heads_alone, BOTH: self.both}[part]()

    def _bare(self) -> Callable[[], object]:
        """Capture the trunk with its classifier, as the benchmark does: on a stream of high priority."""
        function = partial(bare, self.trunk, self._network.taps)
        graph = GraphedPeer(function, self.trunk.memory_for(self.subject.example))
        refuse(self.wrong((), lambda x: merged_answer(graph(x))), BARE)
        return partial(graph, self.subject.example)

    def both(self, kind: type[OverlappedRunner] = OverlappedRunner) -> Callable[[], object]:
        """Capture the network as a kind of runner, and return its replay."""
        example = self.subject.example
        runner = kind(self._network, example, batch_sizes=(len(example),), trunk=self.trunk, forks=self.forks)
        self._opened.callback(runner.close)
        refuse(self.wrong(self._network.taps, runner), BOTH)
        return partial(runner, example)

    def _heads_alone(self) -> Callable[[], object]:
        """Capture the runner's head launches one after another on one stream, without the network's classifier."""
        heads, features = [one.head.as_exit_head() for one in self.heads], [one.x for one in self.heads]
        example, classes = self.subject.example, self.subject.heads[0].num_classes
        buffers = ExitBuffers.allocate(
            len(heads) + 1, len(example), classes, device=example.device,
            with_probs=all(head.return_probs for head in self.subject.heads),
        )  # fmt: skip
        ends = [self._network.taps.index(tap) + 1 for tap in self.forks]  # heads behind share one more launch
        parts = [slice(start, end) for start, end in zip([0, *ends], [*ends, len(heads)], strict=True)]
        launches = [(part, ExitLaunch(buffers, part.start, heads[part])) for part in parts if heads[part]]

        def launch() -> list[HeadOutput]:
            for part, one in launches:
                one(features[part])
            answers = zip(buffers.label, buffers.confidence, buffers.exits, strict=True)
            return [HeadOutput(None, *answer) for answer in answers][: len(heads)]

        torch.cuda.synchronize(example.device)  # buffers and counters are zero before another stream uses them
        captured = chain(launch, example.device)
        captured()
        for head, answer in zip(self.heads, captured.answer, strict=True):
            refuse(head.wrong_answer(answer, peer=True), HEADS)
        return captured

    @cached_property
    def _truth(self) -> EagerTruth:
        return EagerTruth(self._network, self.trunk, self.subject.inputs)

    def wrong(self, which: Sequence[str], runner: Callable[[Tensor], ExitResult]) -> str | None:
        """Compare a captured network's answers with the truth, where nothing and where all leaves at each of some taps.

        Two inputs a pattern: an answer for the one before shows. Return in words what is wrong, or None.
        """
        comparison = Comparison()
        for pattern in (NEVER, *which):
            with self.subject.exits(pattern):
                self._truth.compare(runner, comparison, inputs=2)
        return wrong_in_words(comparison.counts())


class _ForksByRule(OverlappedRunner):
    """Chooses forks, and captures no more than that takes, so that no head is compiled for it."""

    def _capture(self, example: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        self._choose_forks(example)
        return CapturedBatch(StaticInput(example), buffers, (), (), "")
