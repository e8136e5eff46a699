"""Retuning of thresholds while requests come: ``Retuner``, ``retune_thresholds`` on an ``ExitLog``, and ``replay``."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.reference.criteria import CRITERIA, check_criterion
from ..basics.arguments import check_mode, kind_of
from ..listening.batches import Batch, check_input_batch, first_tensor, on_device
from ..listening.reading import parts_in_words
from ..network.early_exit_network import EarlyExitNetwork, check_network
from ..network.learned_from import Samples, identities, kind_of_input, short
from .exit_latency import ExitLatencies, check_latencies, expected_latency
from .thresholds import check_number, exit_indices, exit_scores, scores_of, threshold_behind


class ExitLog(NamedTuple):
    """What E heads said of M samples in the order in which they came, whether or not the samples left there."""

    scores: Tensor
    """[E, M] float; larger is surer."""
    agrees: Tensor
    """[E, M] bool, true where the head's label is that of the classifier; the truth is not known in use."""
    criteria: tuple[str, ...]
    """Of each head, for the range of its scores."""

    def disagreement(self, exits: Tensor) -> float:
        """Return the share of samples that get another answer than the classifier's, given their exit indices."""
        kept = torch.cat([self.agrees, torch.ones_like(self.agrees[:1])])
        return (~kept.gather(0, exits[None])[0]).double().mean().item()

    def between(self, begin: int, end: int) -> "ExitLog":
        """Return the samples from ``begin`` to ``end``, which is not included."""
        return ExitLog(self.scores[:, begin:end], self.agrees[:, begin:end], self.criteria)


def checked(log: object) -> ExitLog:
    """Return a log on the CPU, its scores as the float32 that heads compare, NaN as the least.

    Raises:
        TypeError, ValueError: it is none, or its parts do not fit each other.
    """
    if not isinstance(log, ExitLog):
        raise TypeError(f"log: got {kind_of(log)}, wants an ExitLog")
    scores, agrees, criteria = log
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim != 2 or 0 in scores.shape:
        wants = "[E, M] floats of at least one head and one sample"
        raise ValueError(f"log.scores: got {parts_in_words(scores)}, wants {wants}")
    if not isinstance(agrees, Tensor) or agrees.dtype != torch.bool or agrees.shape != scores.shape:
        wants = f"{list(scores.shape)} of torch.bool, as log.scores has"
        raise ValueError(f"log.agrees: got {parts_in_words(agrees)}, wants {wants}")
    if len(criteria) != len(scores):
        raise ValueError(f"log.criteria: got {len(criteria)}, wants {len(scores)}, one for each head")
    for criterion in criteria:
        check_criterion(criterion)
    lowest = scores_of([CRITERIA[criterion][0] for criterion in criteria])[:, None]
    scores = scores.detach().cpu().float()
    return ExitLog(torch.where(scores.isnan(), lowest, scores), agrees.cpu(), criteria)


#: Share of the samples by which a head is opened at first, and the smallest step that is tried.
_FIRST_STEP = 0.1
_LAST_STEP = 0.01


class _Tried(NamedTuple):
    shares: list[float]
    """Of the log that each head is open for, by its own scores."""
    thresholds: Tensor
    milliseconds: float
    """Until the last sample of a batch leaves, on average."""
    cost: float
    """These, and until each sample leaves by itself: a batch is done sooner only once all of its samples leave."""
    disagreement: float


def retune_thresholds(
    log: ExitLog, latencies: ExitLatencies, *, max_disagreement: float, max_latency_ms: float | None = None
) -> tuple[float, ...]:
    """Return thresholds under which logged samples would have had their answers soonest.

    The policy is that of Apparate (Dai et al., SOSP 2024): from no exit at all, the head is opened a step further that
    saves most time for what it adds in disagreement with the classifier. Its step doubles; that of a head that would
    disagree too much, or saves nothing, is halved, until all are small. Steps are shares of the logged samples, so that
    any criterion will do; samples of equal scores leave together. Of batches, which take as long as their last sample,
    the time of each sample counts as well: the first steps make no batch faster. If in the end none is, nobody leaves.
    It follows a drift and proves nothing: the bound is that of :func:`calibrate_network`.

    Args:
        log: of the last samples, for all heads, as where every head is computed.
        latencies: of the runner.
        max_disagreement: share of the samples that may get another answer than the classifier's, 0 to 1.
        max_latency_ms: enough; no head is opened further once the mean is at most that. None opens as far as it helps.

    Returns:
        A threshold for each head; the end of the criterion's range never exits.

    Raises:
        TypeError, ValueError: arguments that are none of these or do not fit.
    """
    log = checked(log)
    check_latencies(latencies, len(log.scores))
    enough = 0.0 if max_latency_ms is None else max_latency_ms
    check_number("max_disagreement", max_disagreement, 0.0, 1.0, "a number in [0, 1]")
    check_number("max_latency_ms", enough, 0.0, math.inf, "0 or more")
    heads = range(len(log.scores))
    falling = log.scores.sort(1, descending=True).values
    now = nobody = _try(log, falling, [0.0] * len(heads), latencies)
    steps = [_FIRST_STEP] * len(heads)
    while max(steps) >= _LAST_STEP and now.milliseconds > enough:
        better: dict[int, _Tried] = {}
        worth: dict[int, float] = {}  # time saved for each sample more that gets another answer
        for head in heads:
            if steps[head] < _LAST_STEP:
                continue
            shares = [min(1.0, share + steps[head] * (head == one)) for one, share in enumerate(now.shares)]
            tried = _try(log, falling, shares, latencies)
            if tried.disagreement <= max_disagreement and tried.cost < now.cost:
                added = max(0.0, tried.disagreement - now.disagreement)
                better[head], worth[head] = tried, (now.cost - tried.cost) / (added + 1e-6)
            else:
                steps[head] /= 2
        if better:
            best = max(worth, key=worth.__getitem__)
            now = better[best]
            steps[best] *= 2
    found = now if now.milliseconds < nobody.milliseconds else nobody
    return tuple(found.thresholds.tolist())


def _try(log: ExitLog, falling: Tensor, shares: Sequence[float], latencies: ExitLatencies) -> _Tried:
    """Return what thresholds do that let these shares of the samples go, each head by itself; equals go together."""
    samples = falling.shape[1]
    thresholds, gone = torch.empty_like(falling[:, 0]), []
    for head, (share, own) in enumerate(zip(shares, falling, strict=True)):
        low, high = CRITERIA[log.criteria[head]].range
        leaving = round(share * samples)
        if leaving:  # with all that are as sure as the last of them, but for those that no threshold lets go
            leaving = min(int((own >= own[leaving - 1]).sum()), int((own > low).sum()))
        if not leaving:
            thresholds[head] = high
        else:
            thresholds[head] = threshold_behind(own, leaving, low).clamp(low, high)
        if CRITERIA[log.criteria[head]].counts_heads:
            thresholds[head].floor_()  # scores are whole numbers, and so is the patience of PABEE
        gone.append(leaving / samples)
    exits = exit_indices(log.scores, thresholds)
    milliseconds = expected_latency(exits, latencies)
    cost = milliseconds + expected_latency(exits, replace(latencies, batch_size=1))
    return _Tried(gone, thresholds, milliseconds, cost, log.disagreement(exits))


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
        exits = exit_indices(own.scores, scores_of(thresholds))
        shares = torch.bincount(exits, minlength=heads + 1).double() / window
        windows.append(
            ReplayedWindow(
                tuple(thresholds), tuple(shares.tolist()), own.disagreement(exits), expected_latency(exits, latencies)
            )
        )
        if policy is not None:
            thresholds = policy(own)
    return windows


class Retuner:
    """Thresholds of a network that follow its requests; see :meth:`observe`.

    Runners answer as soon as a head is sure, and what later exits would have said is not known then. So a share of the
    requests is computed once more, eagerly and to the end. Thresholds that are tuned on them are written in place:
    every runner of the network follows from its next request on, and nothing is captured again.
    """

    log: ExitLog | None = None
    """On which thresholds were tuned last."""

    def __init__(
        self, network: EarlyExitNetwork, policy: Policy, *, window: int, share: float = 0.1, seed: int = 0
    ) -> None:
        """Follow the requests of a network, whose thresholds stay as they are until a window is over.

        Args:
            network: in eval mode, whose runners answer.
            policy: takes the log of a window when it is over and returns a threshold for each head, such as
                ``functools.partial(retune_thresholds, latencies=latencies, max_disagreement=0.01)``; :func:`replay`
                simulates it.
            window: logged samples after which thresholds are tuned, on these alone.
            share: of the requests that are logged, drawn at random; 1 logs all.
            seed: of the draw.

        Raises:
            TypeError, ValueError: arguments that are none of these.
        """
        check_network(network)
        check_mode(network)
        if not callable(policy):
            raise TypeError(f"policy: got {kind_of(policy)}, wants a function of an ExitLog that returns thresholds")
        if type(window) is not int or window < 1:
            raise ValueError(f"window: got {window!r}, wants a whole number of at least 1")
        check_number("share", share, math.ulp(0.0), 1.0, "a number in (0, 1]")
        if type(seed) is not int:
            raise TypeError(f"seed: got {seed!r}, wants a whole number")
        self.network, self.policy, self.window, self.share = network, policy, window, share
        self._drawn = random.Random(seed)
        self._logged: list[Tensor] = []
        self._samples: list[Samples] = []

    def observe(self, x: Batch) -> tuple[float, ...] | None:
        """Log a request, if it is drawn; when that completes a window, retune.

        For a request that is drawn the host waits until all exits are computed, and at the end of a window for the
        policy; others cost nothing. A head that is not enabled lets nobody go in the log, and keeps its threshold. A
        monitor of the network expects, from then on, the shares that leave in the log under the new thresholds.

        Args:
            x: the batch [N, ...] that a runner was given, before or after it has answered.

        Returns:
            The thresholds that the policy has returned for the heads, if it was asked; else None.

        Raises:
            TypeError, ValueError: no such batch, a network in training mode, or a policy that returns no thresholds for
                these heads; rules are as before then.
        """
        check_input_batch("x", x, may_be_empty=True)
        if not len(first_tensor(x)) or self._drawn.random() >= self.share:
            return None
        check_mode(self.network)
        with torch.no_grad():
            logits = self.network.logits(on_device(x, self.network.device))
        self._logged.append(torch.stack([each.float() for each in logits]).cpu())
        mask = self.network.mask_in(x)
        self._samples.append(Samples([short(identities(x, mask))], frozenset([kind_of_input(x, mask)])))
        if sum(each.shape[1] for each in self._logged) < self.window:
            return None
        self.log = log = self._log()
        self._logged.clear()
        return self._retune(log)

    def _log(self) -> ExitLog:
        """Return the log of the window, by the criteria and temperatures of now."""
        rules = [head.rule for head in self.network.exit_heads]
        logits = torch.cat(self._logged, 1)
        criteria = tuple(rule.criterion for rule in rules)
        scores = exit_scores(logits[:-1], criteria, [rule.temperature for rule in rules])
        for own, rule in zip(scores, rules, strict=True):
            if not rule.enabled:
                own.fill_(CRITERIA[rule.criterion].low)  # which exceeds no threshold
        labels = logits.argmax(2)
        return ExitLog(scores, labels[:-1] == labels[-1], criteria)

    def _retune(self, log: ExitLog) -> tuple[float, ...]:
        network = self.network
        thresholds = self.policy(log)
        if not isinstance(thresholds, Sequence):
            raise TypeError(f"policy: returned {kind_of(thresholds)}, wants a threshold for each head")
        if len(thresholds) != len(network.taps):
            raise ValueError(f"policy: returned {len(thresholds)}, wants {len(network.taps)}, one for each head")
        enabled = [head.rule.enabled for head in network.exit_heads]
        by_tap = zip(network.taps, thresholds, enabled, strict=True)
        network.set_rules({tap: threshold for tap, threshold, changes in by_tap if changes})
        if network.learned_from is not None:
            for samples in self._samples:
                network.learned_from = network.learned_from.plus("thresholds", samples)
        self._samples.clear()
        if network.monitor is not None:
            exits = exit_indices(log.scores, scores_of(thresholds))
            shares = torch.bincount(exits, minlength=len(network.taps) + 1).double() / len(exits)
            network.monitor.expect(shares.tolist(), len(exits))
        return tuple(thresholds)
