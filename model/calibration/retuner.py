"""``Retuner``: logs what all exits say of some of the requests, and tunes thresholds on that while runners answer."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.reference.criteria import CRITERIA
from ..basics.arguments import check_batch, check_mode, kind_of
from ..network.early_exit_network import EarlyExitNetwork, check_network
from ..network.learned_from import Samples, identities, kind_of_input, short
from .retuning import ExitLog, Policy
from .thresholds import exit_indices, exit_scores, scores_of


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
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"share: got {share!r}, wants a number")
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share: got {share}, wants a number in (0, 1]")
        if type(seed) is not int:
            raise TypeError(f"seed: got {seed!r}, wants a whole number")
        self.network, self.policy, self.window, self.share = network, policy, window, share
        self._drawn = random.Random(seed)
        self._logged: list[Tensor] = []
        self._samples: list[Samples] = []

    def observe(self, x: Tensor) -> tuple[float, ...] | None:
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
        check_batch("x", x, may_be_empty=True)
        if not len(x) or self._drawn.random() >= self.share:
            return None
        check_mode(self.network)
        with torch.no_grad():
            logits = self.network.logits(x.to(self.network.device))
        self._logged.append(torch.stack([each.float() for each in logits]).cpu())
        self._samples.append(Samples([short(identities(x))], frozenset([kind_of_input(x)])))
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
