"""``replay``: a simulator that lets logged samples come again, under fixed thresholds or a policy that retunes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .exit_latency import ExitLatencies, expected_latency
from .exit_log import ExitLog, checked
from .retuning import check_latencies
from .thresholds import exit_indices

#: Thresholds for the next samples, given the log of the last ones.
Policy = Callable[[ExitLog], Sequence[float]]


@dataclass(frozen=True)
class ReplayedWindow:
    """Some samples in a row; shares are from 0 to 1."""

    thresholds: tuple[float, ...]
    """In force while they came."""
    shares: tuple[float, ...]
    """Of the samples that leave at each of the E + 1 exits."""
    disagreement: float
    """Share of the samples that get another answer than the classifier's."""
    milliseconds: float
    """Expected latency."""


def replay(
    log: ExitLog,
    latencies: ExitLatencies,
    thresholds: Sequence[float],
    *,
    window: int,
    policy: Policy | None = None,
) -> list[ReplayedWindow]:
    """Return what becomes of logged samples, window by window; no network runs.

    Args:
        log: of all heads, in the order in which the samples came.
        latencies: of the runner that is simulated.
        thresholds: of each head, for the first window.
        window: samples after which thresholds may change; those at the end that fill none are left out.
        policy: takes the log of a window when it is over and returns thresholds for the next one, such as
            ``lambda log: retune_thresholds(log, latencies, max_disagreement=0.01)``. None keeps the first.

    Raises:
        TypeError, ValueError: arguments that are none of these or do not fit.
    """
    log = checked(log)
    heads, samples = log.scores.shape
    check_latencies(latencies, heads)
    if type(window) is not int or not latencies.batch_size <= window <= samples:
        raise ValueError(
            f"window: got {window!r}, wants a whole number from {latencies.batch_size}, a batch, to {samples}"
        )
    windows = []
    for begin in range(0, samples - window + 1, window):
        if len(thresholds) != heads:
            raise ValueError(f"thresholds: got {len(thresholds)}, wants {heads}, one for each head")
        own = log.between(begin, begin + window)
        exits = exit_indices(own.scores, torch.tensor(thresholds, dtype=torch.float32))
        shares = torch.bincount(exits, minlength=heads + 1) / window
        windows.append(
            ReplayedWindow(
                tuple(thresholds), tuple(shares.tolist()), own.disagreement(exits), expected_latency(exits, latencies)
            )
        )
        if policy is not None:
            thresholds = policy(own)
    return windows
