"""Heads in situ: a network captured as its overlapped runner does, its heads launched as told, its answers checked."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...kernels import ExitBuffers
from ...kernels.launch.choose_config import chosen_by_rule, overriding
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...model import ExitResult, Trunk, make_trunk
from ...model.listening.taps import listening
from ...model.runners.overlapped import OverlappedRunner
from ...model.runners.program import CapturedBatch, StaticInput
from .cells import NEVER
from .eager_truth import Answer, Comparison, EagerTruth, wrong_in_words
from .heads_alone import NETWORK, AloneHead
from .subject import Subject

#: Configurations of heads, by their shapes.
Configs = Mapping[HeadShape, LaunchConfig]


class HeadsInSitu:
    """A subject on a trunk.

    Captures differ in what is asked for alone: all other heads are launched by rule, whatever the tables hold.
    """

    def __init__(self, subject: Subject, trunk: str) -> None:
        """Run the heads of ``subject`` beside a trunk of that kind; see :func:`auxhead.model.make_trunk`."""
        self.subject = subject
        self._network = network = subject.network
        self._kind = trunk
        self._trunk: Trunk = make_trunk(network.backbone, network.taps, subject.example, trunk, network.reading)
        features, final = self._run_trunk()
        self.heads = [AloneHead(head, x) for head, x in zip(subject.heads, features, strict=True)]
        """Those of the taps, each with what its tap gives it."""
        classifier = self._trunk.classifier
        self.exits = [*self.heads, final if classifier is None else AloneHead(classifier, final)]
        """These, and the classifier as one of them; or its logits, where it is none."""
        launched = [one for one in self.exits if isinstance(one, AloneHead)]
        self._heads_by_rule = {(head.shape, NETWORK): chosen_by_rule(head.shape) for head in launched}

    def _run_trunk(self) -> tuple[list[Tensor], Tensor]:
        """Return the input of each head, as its tap lays it out in memory, and the input of the classifier."""
        features: list[Tensor] = []
        x = self.subject.example.contiguous(memory_format=self._trunk.memory_format)
        taps, trunk = self._network.taps, self._trunk

        def keep(_index: int, y: Tensor) -> None:
            features.append(y.clone())

        with torch.no_grad(), listening(trunk.module, taps, keep, trunk.reading):
            final = trunk.module(x)
        return features, final.clone()

    @property
    def protocol(self) -> dict[str, Any]:
        """Conditions of times in situ, beside those of times alone, as records keep them."""
        return {
            "trunk": trunk_fingerprint(self._trunk, self._network.taps, self.subject.example),
            "trunk_kind": self._kind,
            "forks": list(self.forks),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }

    @cached_property
    def forks(self) -> tuple[str, ...]:
        """Taps after which a launch leaves the trunk, by rule: the same ones in all captures."""
        example = self.subject.example
        with _ForksByRule(self._network, example, batch_sizes=(len(example),), trunk=self._trunk) as runner:
            return runner.forks[len(example)]

    def runner(self, kind: type[OverlappedRunner] = OverlappedRunner) -> OverlappedRunner:
        """Capture the network afresh."""
        example = self.subject.example
        return kind(self._network, example, batch_sizes=(len(example),), trunk=self._trunk, forks=self.forks)

    def launching(self, configs: Configs) -> AbstractContextManager[None]:
        """Launch heads of some shapes like this until the context ends, and the others by rule."""
        return overriding(self.all_configs(configs))

    def all_configs(self, configs: Configs) -> dict[tuple[HeadShape, str], LaunchConfig]:
        """Return the configurations of all heads, those of some shapes being these and the others by rule."""
        return self._heads_by_rule | {(shape, NETWORK): config for shape, config in configs.items()}

    @cached_property
    def _truth(self) -> EagerTruth:
        return EagerTruth(self._network, self._trunk, self.subject.inputs)

    def wrong(self, which: Sequence[str], runner: Callable[[Tensor], ExitResult | Answer]) -> str | None:
        """Compare a captured network's answers with the truth, where nothing and where all leaves at each of some taps.

        Two inputs a pattern: an answer for the one before shows. Return in words what is wrong, or None.
        """
        comparison = Comparison()
        for pattern in (NEVER, *which):
            with self.subject.exits(pattern):
                self._truth.compare(lambda x: Answer.of(runner(x)), comparison, inputs=2)
        return wrong_in_words(comparison.counts())


class _ForksByRule(OverlappedRunner):
    """Chooses forks, and captures no more than that takes, so that no head is compiled for it."""

    def _capture(self, example: Tensor, buffers: ExitBuffers) -> CapturedBatch:
        self._choose_forks(example)
        return CapturedBatch(StaticInput(example), buffers, (), (), "")


def trunk_fingerprint(trunk: Trunk, taps: Sequence[str], example: Tensor) -> str:
    """Name a trunk by its layers, their sizes and types and its input: 16 hexadecimal digits."""
    parts = [f"{name} {list(one.shape)} {one.dtype}" for name, one in trunk.module.state_dict().items()]
    layers = [f"{name} {type(layer).__qualname__} {layer.extra_repr()}" for name, layer in trunk.module.named_modules()]
    around = [str(list(example.shape)), str(example.dtype), str(trunk.memory_format), *taps, *trunk.notes]
    return hashlib.sha256("\n".join([*parts, *layers, *around]).encode()).hexdigest()[:16]
