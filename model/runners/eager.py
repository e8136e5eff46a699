"""The eager runner: the trunk on one stream, the heads beside it on another, joined before the answer."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels import HeadOutput, decide
from ..exit_result import ExitResult, first_sure
from ..streams import StreamPair, stream_pair
from ..taps import ForwardLeft, listening
from ..trunk.trunk import Trunk
from .runner import Closing

if TYPE_CHECKING:
    from ..early_exit_network import EarlyExitNetwork


class EagerRunner(Closing):
    """Runs an :class:`EarlyExitNetwork` without a graph, for any batch size; what other runners are tested against.

    On a CUDA device the backbone runs on a high-priority stream, and each head on a low-priority one as soon as its tap
    has returned. The caller's stream waits for both, so that results are used like any other tensors. On the CPU
    everything runs in line.
    """

    def __init__(self, network: "EarlyExitNetwork", *, in_line: bool = False, trunk: Trunk | None = None) -> None:
        """Run a network.

        Args:
            network: to run.
            in_line: keep the heads on the stream of the backbone, for comparison.
            trunk: from :func:`make_trunk`, to run instead of the network's backbone.
        """
        self.network = network
        self.in_line = in_line
        self._trunk = trunk

    @torch.no_grad()
    def __call__(self, x: Tensor, *, stop: bool = False) -> ExitResult:
        """Answer for a batch.

        Args:
            x: a batch that the backbone takes.
            stop: leave the forward as soon as every sample of the batch is sure. The host then waits for each head's
                decision, which is what an ``if confidence > t`` costs.
        """
        self.network.check_taps(x)
        if self._trunk is not None:
            x = x.contiguous(memory_format=self._trunk.memory_format)
        if x.device.type != "cuda":
            return self._merge(self._answers(x, stop, None))
        caller = torch.cuda.current_stream(x.device)
        streams = stream_pair(x.device)
        streams.trunk.wait_stream(caller)
        streams.side.wait_stream(caller)
        try:
            with torch.cuda.stream(streams.trunk):
                answers = self._answers(x, stop, streams)
        finally:
            caller.wait_stream(streams.trunk)
            caller.wait_stream(streams.side)
        result = self._merge(answers)
        if not torch.cuda.is_current_stream_capturing():
            # The answers go back to the allocator now; another caller's run must not write over them before the merge.
            streams.trunk.wait_stream(caller)
            streams.side.wait_stream(caller)
        return result

    def refresh(self) -> None:
        """Take over parameters of the backbone that were changed in place, where the trunk holds copies of them."""
        if self._trunk is not None:
            self._trunk.refresh()

    def describe(self) -> str:
        """Say what was made of the trunk, a line each."""
        return "\n".join(() if self._trunk is None else self._trunk.notes)

    def close(self) -> None:
        """Nothing is held; for the sake of code that takes any runner."""

    def _merge(self, answers: list[HeadOutput]) -> ExitResult:
        return first_sure(answers, with_probs=all(head.return_probs for head in self.network.heads))

    def _answers(self, x: Tensor, stop: bool, streams: StreamPair | None) -> list[HeadOutput]:
        """Run backbone and heads; returns what each exit says, up to the one at which the forward was left."""
        network = self.network
        answers: list[HeadOutput] = []
        held: list[Tensor] = []  # the side stream may still read what the trunk has let go of
        sure: Tensor | None = None

        def on_tap(place: int, features: Tensor) -> None:
            nonlocal sure
            beside: AbstractContextManager[object] = nullcontext()
            if streams is not None and not self.in_line:
                streams.side.wait_stream(torch.cuda.current_stream(x.device))
                held.append(features)
                beside = torch.cuda.stream(streams.side)
            with beside:
                answers.append(network.heads[place](features))
                if stop:
                    sure = answers[-1].exit if sure is None else sure | answers[-1].exit
                    if bool(sure.all()):
                        raise ForwardLeft

        backbone, classifier = network.backbone, None
        if self._trunk is not None:
            backbone, classifier = self._trunk.module, self._trunk.classifier
        try:
            with listening(backbone, network.taps, on_tap):
                final = backbone(x)
        except ForwardLeft:
            return answers
        finally:
            if streams is not None:
                streams.trunk.wait_stream(streams.side)  # before `held` goes back to the trunk's memory
        return [*answers, decide(final, temperature=1.0, threshold=1.0) if classifier is None else classifier(final)]
