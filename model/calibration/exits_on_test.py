"""Rows of the report: reliability, share and accuracy of each exit on the test split."""

from collections.abc import Sequence

from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from .exit_latency import ExitLatencies
from .report import CalibratedExit
from .temperatures import reliability


def exits_on_test(
    network: EarlyExitNetwork,
    logits: Tensor,
    labels: Tensor,
    exits: Tensor,
    temperatures: Sequence[float],
    thresholds: Sequence[float | None],
    work: Sequence[float],
    latencies: ExitLatencies | None,
) -> list[CalibratedExit]:
    """Return a row for each head and, last, for the classifier.

    Args:
        network: whose exits they are.
        logits: [E + 1, M, K] of the test split.
        labels: [M] int64.
        exits: [M] int64, where each sample leaves.
        temperatures: E + 1 of them.
        thresholds: E of them, None for a head that never exits.
        work: at each of E + 1 exits.
        latencies: of the runner, if there are.
    """
    names = [*network.taps, "classifier"]
    criteria = [*(head.rule.criterion for head in network.exit_heads), "max_prob"]
    rows = []
    for index, (name, threshold) in enumerate(zip(names, [*thresholds, None], strict=True)):
        right, left = logits[index].argmax(1) == labels, exits == index
        rows.append(
            CalibratedExit(
                name=name,
                criterion=criteria[index],
                temperature=temperatures[index],
                threshold=threshold,
                samples=int(left.sum()),
                share=left.double().mean().item(),
                accuracy=right[left].double().mean().item() if left.any() else None,
                accuracy_on_all=right.double().mean().item(),
                work=work[index],
                latency_ms=None if latencies is None else latencies.milliseconds[index],
                before=reliability(logits[index].softmax(1).amax(1), right),
                after=reliability((logits[index] / temperatures[index]).softmax(1).amax(1), right),
            )
        )
    return rows
