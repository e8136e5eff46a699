"""Early exit as people write it first: every head in line, and ``if confidence > threshold`` after each."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import HeadOutput, pooled_features
from .early_exit_network import EarlyExitNetwork
from .exit_result import ExitResult, first_sure
from .fused_aux_head import FusedAuxHead
from .taps import ForwardLeft


class NaiveForward:
    """What ``auxhead profile`` shows as "before": eager PyTorch, six to eight launches and an ``.item()`` per head.

    The forward is left as soon as every sample of the batch is sure. The backbone is a copy with the heads in its
    hooks, lest the hooks touch what a runner captures or compiles.
    """

    def __init__(self, network: EarlyExitNetwork) -> None:
        """Copy ``network``, whose taps have been checked."""
        self._backbone = deepcopy(network.backbone)
        self._answers: list[HeadOutput] = []
        self._sure: Tensor | None = None
        for tap, head in zip(network.taps, network.heads, strict=True):
            assert isinstance(head, FusedAuxHead)
            self._backbone.get_submodule(tap).register_forward_hook(self._hook_of(deepcopy(head)))

    def _hook_of(self, head: FusedAuxHead) -> Callable[[nn.Module, Any, Tensor], None]:
        rule = head.rule

        def hook(_module: nn.Module, _inputs: Any, features: Tensor) -> None:
            logits = head.linear(pooled_features(features, head.pool, head.pool_size))
            answer = _decide(logits, rule.temperature, rule.threshold_in_force)
            self._answers.append(answer)
            if len(features) == 1:
                everyone_sure = answer.exit.item()
            else:
                self._sure = answer.exit if self._sure is None else self._sure | answer.exit
                everyone_sure = self._sure.all().item()
            if everyone_sure:
                raise ForwardLeft

        return hook

    @torch.no_grad()
    def __call__(self, x: Tensor) -> ExitResult:
        """Answer for a batch; of one sample, ``exit_index`` is on the CPU, where an ``if`` leaves it."""
        self._answers, self._sure = [], None
        try:
            self._answers.append(_decide(self._backbone(x), 1.0, 1.0))
        except ForwardLeft:
            pass
        answers = self._answers
        if len(x) > 1:
            return first_sure(answers, with_probs=True)
        return ExitResult(
            answers[-1].label, answers[-1].confidence, answers[-1].probs, torch.tensor([len(answers) - 1])
        )


def _decide(logits: Tensor, temperature: float, threshold: float) -> HeadOutput:
    """Softmax, max and compare, in the logits' dtype."""
    if temperature != 1.0:
        logits = logits / temperature
    probs = torch.softmax(logits, dim=1)
    confidence, label = probs.max(dim=1)
    return HeadOutput(probs, label, confidence, confidence > threshold)
