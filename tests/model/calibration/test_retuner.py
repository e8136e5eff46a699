"""Thresholds that follow requests while a runner answers them: in place, within the policy's budgets."""

import functools
from collections.abc import Sequence

import pytest
import torch
from auxhead.model import (
    EarlyExitNetwork,
    ExitLatencies,
    ExitLog,
    ExitMonitor,
    ExitRule,
    FusedAuxHead,
    Retuner,
    make_runner,
    replay,
    retune_thresholds,
)
from auxhead.model.calibration.exit_latency import expected_latency
from auxhead.model.calibration.thresholds import exit_indices
from auxhead.model.network.learned_from import LearnedFrom, fingerprint, identities, short
from support.exits_plan_cases import assert_same, images, make_network, unplanned
from support.graph_runner_cases import WAYS
from support.simulated_cuda import simulated_cuda
from torch import Tensor, nn

LATENCIES = ExitLatencies((1.0, 2.0, 4.0), 8, "made up", "none")
POLICY = functools.partial(retune_thresholds, latencies=LATENCIES, max_disagreement=0.02)


class Told(nn.Module):
    """Says what its input says: of each sample [3, 2] the logits of two heads and of the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.first(x[:, 0])
        self.second(x[:, 1])
        return x[:, 2]


def told(rules: Sequence[ExitRule | float] = (0.6, 0.6)) -> EarlyExitNetwork:
    heads = {tap: FusedAuxHead(2, 2, pool="none") for tap in ("first", "second")}
    for head in heads.values():
        nn.init.eye_(head.linear.weight)
        nn.init.zeros_(head.linear.bias)
    rules_by_tap = dict(zip(heads, rules, strict=True))
    return EarlyExitNetwork(Told(), heads, rules_by_tap, example_input=torch.randn(2, 3, 2)).eval()


def requests(number: int, unsure: float, seed: int = 0) -> list[Tensor]:
    """Batches of 8, of which the heads say what is wrong half the time where they are less sure than ``unsure``."""
    generator = torch.Generator().manual_seed(seed)
    scores = 0.5 + 0.5 * torch.rand(number * 8, 2, generator=generator)
    wrong = (scores < unsure) & (torch.rand(number * 8, 2, generator=generator) < 0.5)
    logits = (scores / (1 - scores)).log() * torch.where(wrong, -1, 1)
    told_of_heads = torch.stack([logits, torch.zeros_like(logits)], 2)
    classifier = torch.tensor([5.0, 0.0]).expand(len(logits), 1, 2)
    return list(torch.cat([told_of_heads, classifier], 1).split(8))


def thresholds_of(net: EarlyExitNetwork) -> tuple[float, ...]:
    return tuple(head.rule.threshold for head in net.exit_heads)


def serve(net: EarlyExitNetwork, retuner: Retuner, batches: Sequence[Tensor]) -> list[float]:
    """Answer with a runner and retune; returns which share of each window got another answer than the classifier's."""
    wrong, windows = [], []
    with make_runner(net, batches[0]) as runner:
        for x in batches:
            wrong += runner(x).label.ne(x[:, 2].argmax(1)).tolist()
            if retuner.observe(x) is not None:
                windows.append(sum(wrong) / len(wrong))
                wrong.clear()
    return windows


@pytest.mark.usefixtures("without_interpreter")
def test_a_drift_is_followed_in_place() -> None:
    net, sizes = told(), []
    tensors = [head.rule.threshold_tensor for head in net.exit_heads]
    where = [tensor.data_ptr() for tensor in tensors]

    def policy(log: ExitLog) -> tuple[float, ...]:
        sizes.append(log.scores.shape[1])
        return POLICY(log)

    retuner = Retuner(net, policy, window=395, share=1.0)
    before = serve(net, retuner, requests(150, unsure=0.6))
    early = thresholds_of(net)
    after = serve(net, retuner, requests(150, unsure=0.9, seed=1))
    assert len(before) == len(after) == 3 and early != thresholds_of(net)
    assert max(before[1:]) < 0.05 < 0.1 < after[0] and max(after[1:]) < 0.05, "one window late"
    assert [head.rule.threshold_tensor for head in net.exit_heads] == tensors  # the same objects
    assert [tensor.data_ptr() for tensor in tensors] == where
    assert tuple(tensor.item() for tensor in tensors) == thresholds_of(net)
    assert sizes == [400] * 6, "each window begins empty, and no request is cut"
    assert retuner.observe(torch.empty(0, 3, 2)) is None


def test_requests_that_were_tuned_on_are_noted_where_anything_is() -> None:
    net, x = told(), requests(1, unsure=0.6)[0]
    retuner = Retuner(net, POLICY, window=8, share=1.0)
    assert retuner.observe(x) and net.learned_from is None
    net.learned_from = LearnedFrom(None, fingerprint(net))
    assert retuner.observe(x)
    (part,) = net.learned_from.parts
    assert part.role == "thresholds" and torch.equal(part.hashes, short(identities(x)).unique())


def outcome(log: ExitLog, thresholds: Sequence[float]) -> tuple[float, float]:
    exits = exit_indices(log.scores, torch.tensor(thresholds))
    return log.disagreement(exits), expected_latency(exits, LATENCIES)


@pytest.mark.parametrize(("most", "most_ms"), [(0.0, None), (0.02, 3.5), (0.02, 2.5), (0.2, 2.5)])
def test_budgets_hold_on_what_was_logged(most: float, most_ms: float | None) -> None:
    net = told()
    policy = functools.partial(retune_thresholds, latencies=LATENCIES, max_disagreement=most, max_latency_ms=most_ms)
    retuner = Retuner(net, policy, window=800, share=1.0)
    found = [retuner.observe(x) for x in requests(100, unsure=0.7)]
    assert found[:-1] == [None] * 99 and found[-1] == thresholds_of(net) == policy(retuner.log)
    disagreement, milliseconds = outcome(retuner.log, thresholds_of(net))
    assert disagreement <= most and milliseconds < 4.0
    furthest = outcome(retuner.log, POLICY(retuner.log, max_disagreement=most))
    if most_ms is None or furthest[1] > most_ms:
        assert (disagreement, milliseconds) == furthest, "the latency is out of reach: as near as agreement allows"
    else:
        assert furthest[1] < milliseconds <= most_ms and disagreement < furthest[0], "enough, and no further"
    (window,) = replay(retuner.log, LATENCIES, thresholds_of(net), window=800)
    assert (window.disagreement, window.milliseconds) == (disagreement, milliseconds)


@pytest.mark.usefixtures("without_interpreter")
@pytest.mark.parametrize("criterion", ["entropy", "patience"])
def test_the_log_is_what_heads_say_under_their_rules(criterion: str) -> None:
    net = told([ExitRule(criterion=criterion, temperature=1.7), 1.0])
    batches = requests(4, unsure=0.8)
    retuner = Retuner(net, lambda log: POLICY(log), window=32, share=1.0)
    wanted = [[head(x[:, place]) for place, head in enumerate(net.exit_heads)] for x in batches]
    for x in batches:
        retuner.observe(x)
    assert retuner.log.criteria == (criterion, "max_prob")
    for place in range(2):
        torch.testing.assert_close(retuner.log.scores[place], torch.cat([said[place].confidence for said in wanted]))
        assert retuner.log.agrees[place].tolist() == [label == 0 for said in wanted for label in said[place].label]


def test_a_share_of_the_requests_is_logged_the_same_for_the_same_seed() -> None:
    asked = []

    def logged_of(seed: int) -> list[int]:
        net = told()
        retuner = Retuner(net, lambda _log: (0.7, 0.8), window=1, share=0.2, seed=seed)
        ran = net.backbone.register_forward_hook(lambda *_: asked.append(len(found)))
        found: list[int] = []
        for x in requests(500, unsure=0.7):
            found.append(retuner.observe(x) is not None)
        ran.remove()
        return found

    first = logged_of(3)
    assert asked == [place for place, logged in enumerate(first) if logged], "of the others nothing is computed"
    assert first == logged_of(3) != logged_of(4) and 70 <= sum(first) <= 130


def test_a_head_that_is_not_enabled_stays_as_it_is() -> None:
    net = told([ExitRule(0.6, enabled=False), 0.6])
    retuner = Retuner(net, POLICY, window=80, share=1.0)
    for x in requests(10, unsure=0.5):
        retuner.observe(x)
    first, second = (head.rule for head in net.exit_heads)
    assert (first.threshold, first.enabled) == (0.6, False) and second.threshold < 0.6
    assert not (retuner.log.scores[0] > 0.0).any()
    assert outcome(retuner.log, thresholds_of(net))[1] == 2.0, "all leave at the second head"


@pytest.mark.usefixtures("without_interpreter")
def test_a_monitor_expects_what_the_log_shows() -> None:
    net = told()
    net.monitor = ExitMonitor((1.0, 0.0, 0.0), 1000)
    retuner, batches = Retuner(net, POLICY, window=400, share=1.0), requests(100, unsure=0.8)
    with make_runner(net, batches[0]) as runner:
        for x in batches[:50]:
            runner(x)
            retuner.observe(x)
        assert net.monitor.samples == 400 and int(net.monitor.counts().sum()) == 0
        exits = [runner(x).exit_index for x in batches[:50]]
        shares = torch.bincount(torch.cat(exits), minlength=3) / 400
        assert net.monitor.shares == pytest.approx(shares.tolist()) and net.monitor.shares[0] < 1.0
        assert net.monitor.counts().sum() == 400 and not net.monitor.check()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_captured_graphs_stay_and_follow(way: dict) -> None:
    net, x = make_network(), images(8)
    retuner = Retuner(net, lambda _log: (0.0, 0.5, 1.0), window=8, share=1.0)
    with simulated_cuda():
        runner = make_runner(net, x, batch_sizes=(2, 4), **way)
        before, held = runner(x), {size: (one, list(one.graphs)) for size, one in runner._captured.items()}
        before = [part.clone() for part in before]
        assert retuner.observe(x) == (0.0, 0.5, 1.0)
        found = runner(x)
        assert_same(found, unplanned(net, x))
        assert found.exit_index.eq(0).all() and not torch.equal(found.exit_index, before[3])
        assert {size: (one, list(one.graphs)) for size, one in runner._captured.items()} == held


def test_bad_arguments_are_named() -> None:
    net, x = told(), requests(1, unsure=0.5)[0]
    for given, error, message in (
        ({"network": 1}, TypeError, "network: got int, wants an EarlyExitNetwork"),
        ({"network": told().train()}, ValueError, r"network: in training mode, wants network.eval\(\)"),
        ({"policy": 0.9}, TypeError, "policy: got float, wants a function of an ExitLog that returns"),
        ({"window": 0}, ValueError, "window: got 0, wants a whole number of at least 1"),
        ({"window": 1.5}, ValueError, "window: got 1.5, wants a whole number of at least 1"),
        ({"share": 0.0}, ValueError, r"share: got 0.0, wants a number in \(0, 1\]"),
        ({"share": 1.5}, ValueError, r"share: got 1.5, wants a number in \(0, 1\]"),
        ({"share": "all"}, TypeError, "share: got 'all', wants a number"),
        ({"seed": None}, TypeError, "seed: got None, wants a whole number"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            Retuner(**{"network": net, "policy": POLICY, "window": 8, **given})
    retuner = Retuner(net, POLICY, window=8, share=1.0)
    with pytest.raises(TypeError, match="^x: got list, wants a torch.Tensor"):
        retuner.observe([1.0])
    net.train()
    with pytest.raises(ValueError, match="^network: in training mode"):
        retuner.observe(x)
    net.eval()
    net.monitor = ExitMonitor((0.5, 0.3, 0.2), 10)
    for returned, error, message in (
        (None, TypeError, "policy: returned NoneType, wants a threshold for each head"),
        ((0.9,), ValueError, "policy: returned 1, wants 2, one for each head"),
        ((0.9, 1.5), ValueError, r"threshold: got 1.5, wants a number in \[0.0, 1.0\]"),
        ((0.9, "high"), TypeError, r"rules\['second'\]: got str, wants an ExitRule or a threshold"),
    ):
        retuner = Retuner(net, lambda _log, returned=returned: returned, window=8, share=1.0)
        with pytest.raises(error, match=f"^{message}"):
            retuner.observe(x)
        assert thresholds_of(net) == (0.6, 0.6) and net.monitor.shares == (0.5, 0.3, 0.2)
