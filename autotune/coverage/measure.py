"""Calibrates what a network has said on many splits, each with its own test split."""

from collections.abc import Iterator
from typing import Any

from ...model import EarlyExitNetwork
from ...model.calibration.budget import Budget
from ...model.calibration.calibrate_network import calibrate_exits
from ...model.calibration.exit_logits import ExitLogits
from ...model.calibration.splits import draw_splits


def repeated(
    network: EarlyExitNetwork, collected: ExitLogits, budget: float, confidence: float, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each split.

    Args:
        network: that has not learned from the samples.
        collected: what it says of them.
        budget: largest drop of accuracy, 0 to 1.
        confidence: of the bound.
        repeats: seeds from 0 on.
    """
    for seed in range(repeats):
        report, _ = calibrate_exits(
            network, collected, draw_splits(collected.identities, seed), Budget("max_accuracy_drop", budget),
            latencies=None, confidence=confidence, seed=seed,
        )  # fmt: skip
        yield {
            "seed": seed,
            "reachable": report.bound.reachable,
            "max_accuracy_drop": report.bound.max_accuracy_drop,
            "accuracy_drop": report.accuracy_drop,
            "within": report.accuracy_drop <= report.bound.max_accuracy_drop + 1e-9,
            "accuracy": report.accuracy,
            "full_accuracy": report.full_accuracy,
            "shares": [row.share for row in report.exits],
            "mean_exit": report.mean_exit,
        }
