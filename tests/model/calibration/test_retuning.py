"""Thresholds retuned on a log, and the simulator that shows what that comes to."""

import dataclasses
import functools

import pytest
import torch
from auxhead.kernels import CRITERIA
from auxhead.model import ExitLatencies, ExitLog, FusedAuxHead, replay, retune_thresholds
from auxhead.model.calibration.exit_latency import expected_latency
from auxhead.model.calibration.thresholds import exit_indices

LATENCIES = ExitLatencies((1.0, 2.0, 4.0), 1, "made up", "none")
NEVER = (1.0, 1.0)


def made(samples, unsure=0.3, seed=0):
    """A log of two heads that disagree where their scores are below ``unsure``, half the time."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(2, samples, generator=generator)
    limits = torch.tensor([[unsure + 0.1], [unsure]])
    return ExitLog(scores, (scores > limits) | (torch.rand(2, samples, generator=generator) < 0.5), ("max_prob",) * 2)


def outcome(log, thresholds, latencies=LATENCIES):
    exits = exit_indices(log.scores, torch.tensor(thresholds))
    return log.disagreement(exits), expected_latency(exits, latencies)


@pytest.mark.parametrize("criterion", ["max_prob", "energy"])
def test_defaults_for_new_tensors_do_not_matter(criterion):
    """A threshold of another dtype would let others go."""
    log = made(300)._replace(criteria=(criterion,) * 2)
    log.scores[:, :40] = 1.0
    policy = functools.partial(retune_thresholds, latencies=LATENCIES, max_disagreement=0.02)
    wanted = policy(log), replay(log, LATENCIES, (0.5, 0.5), window=100, policy=policy)
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            assert (policy(log), replay(log, LATENCIES, (0.5, 0.5), window=100, policy=policy)) == wanted
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert (policy(log), replay(log, LATENCIES, (0.5, 0.5), window=100, policy=policy)) == wanted


def test_more_disagreement_saves_more_and_with_a_latency_budget_heads_open_no_further_than_that():
    log = made(1000)
    times = [outcome(log, retune_thresholds(log, LATENCIES, max_disagreement=one))[1] for one in (0.0, 0.05, 0.5)]
    assert times == sorted(times, reverse=True) and times[0] > times[-1] == 1.0
    enough = retune_thresholds(log, LATENCIES, max_disagreement=0.5, max_latency_ms=3.0)
    disagreement, milliseconds = outcome(log, enough)
    assert 2.0 < milliseconds <= 3.0 and disagreement == 0.0


def test_close_to_the_best_of_a_fine_grid():
    log = made(400)
    grid = torch.linspace(0, 1, 41).tolist()
    tried = [outcome(log, (first, second)) for first in grid for second in grid]
    best = min(milliseconds for disagreement, milliseconds in tried if disagreement <= 0.02)
    disagreement, milliseconds = outcome(log, retune_thresholds(log, LATENCIES, max_disagreement=0.02))
    assert disagreement <= 0.02 and milliseconds <= 1.05 * best


@pytest.mark.parametrize("size", [4, 32])
def test_batches_that_leave_with_their_last_sample_get_faster(size):
    """Where a tenth of the samples leaves, no batch does: a single step saves nothing."""
    log, latencies = made(1600, unsure=0.1), dataclasses.replace(LATENCIES, batch_size=size)
    disagreement, milliseconds = outcome(log, retune_thresholds(log, latencies, max_disagreement=0.02), latencies)
    assert disagreement <= 0.02 and milliseconds < 2.5


def test_where_no_batch_gets_faster_or_heads_always_disagree_nobody_leaves():
    log, latencies = made(1600, unsure=0.8), dataclasses.replace(LATENCIES, batch_size=64)
    assert retune_thresholds(log, latencies, max_disagreement=0.01) == NEVER
    log = ExitLog(torch.rand(2, 50), torch.zeros(2, 50, dtype=torch.bool), ("max_prob",) * 2)
    assert retune_thresholds(log, LATENCIES, max_disagreement=0.0) == NEVER


@pytest.mark.parametrize("share", [0.02, 1.0])
def test_equal_scores_leave_together(share):
    """Those that are rounded to 1, say; all heads agree."""
    scores = torch.linspace(0.1, 0.9, 200).repeat(2, 1)
    scores[:, : round(200 * share)] = 1.0
    log = ExitLog(scores, torch.ones(2, 200, dtype=torch.bool), ("max_prob",) * 2)
    assert outcome(log, retune_thresholds(log, LATENCIES, max_disagreement=0.01)) == (0.0, 1.0)
    log.agrees[:, round(200 * share) :] = False
    thresholds = retune_thresholds(log, LATENCIES, max_disagreement=0.0)
    assert outcome(log, thresholds)[1] == pytest.approx(4 - 3 * round(200 * share) / 200)
    assert [FusedAuxHead(2, 2, rule=one).rule.threshold for one in thresholds] == list(thresholds)


def test_patience_is_a_whole_number_of_heads():
    """The second head agrees with the first for the samples that are right."""
    counts = torch.tensor([[1.0] * 10, [2.0] * 6 + [1.0] * 4])
    log = ExitLog(counts, torch.tensor([[True] * 6 + [False] * 4] * 2), ("patience",) * 2)
    first, second = retune_thresholds(log, LATENCIES, max_disagreement=0.0)
    assert first == CRITERIA["patience"].high and second == 1.0
    assert retune_thresholds(log, LATENCIES, max_disagreement=1.0)[0] == 0.0


def test_the_least_score_leaves_under_no_threshold_nor_does_what_is_no_number():
    scores = torch.tensor([[0.0] * 9 + [0.5], [0.0] * 10])
    log = ExitLog(scores, torch.ones(2, 10, dtype=torch.bool), ("max_prob",) * 2)
    assert outcome(log, retune_thresholds(log, LATENCIES, max_disagreement=0.0)) == (0.0, pytest.approx(3.7))
    log = made(100)
    log.scores[:, :50] = torch.nan
    assert torch.tensor(retune_thresholds(log, LATENCIES, max_disagreement=1.0)).isfinite().all()


def test_a_drift_breaks_fixed_thresholds_and_a_policy_follows_it():
    early, late = made(1500), made(1500, unsure=0.7, seed=1)
    log = ExitLog(torch.cat([early.scores, late.scores], 1), torch.cat([early.agrees, late.agrees], 1), early.criteria)
    policy = functools.partial(retune_thresholds, latencies=LATENCIES, max_disagreement=0.02)
    fixed = replay(log, LATENCIES, policy(early), window=500)
    followed = replay(log, LATENCIES, policy(early), window=500, policy=policy)
    assert len(fixed) == len(followed) == 6 and {one.thresholds for one in fixed} == {policy(early)}
    assert max(one.disagreement for one in fixed[:3]) < 0.05 < 0.1 < min(one.disagreement for one in fixed[3:])
    assert followed[3].disagreement > 0.1 > 0.05 > max(one.disagreement for one in followed[4:])  # one window late
    assert all(sum(one.shares) == pytest.approx(1.0) for one in fixed + followed)


def test_a_window_is_what_its_thresholds_do_to_its_samples():
    log = made(100)
    first, second = replay(log, LATENCIES, (0.5, 0.6), window=50)
    assert (second.disagreement, second.milliseconds) == outcome(log.between(50, 100), (0.5, 0.6))
    assert first.shares[0] == pytest.approx((log.scores[0, :50] > 0.5).double().mean().item())


def test_bad_arguments_are_named():
    log, more = made(5), {"max_disagreement": 0.1}
    for arguments, error, message in (
        ((1, LATENCIES), TypeError, "log: got int, wants an ExitLog"),
        ((ExitLog([0.5], None, ()), LATENCIES), ValueError, "log.scores: got a list of 1, wants"),
        ((log._replace(agrees=torch.ones(2, 4) > 0), LATENCIES), ValueError, r"log.agrees: got a tensor \[2, 4\]"),
        ((log._replace(criteria=("max_prob",)), LATENCIES), ValueError, "log.criteria: got 1, wants 2"),
        ((log._replace(criteria=("max_prob", "luck")), LATENCIES), ValueError, "criterion: got 'luck'"),
        ((log, (1.0, 2.0)), TypeError, "latencies: got tuple, wants"),
        ((log, ExitLatencies((1.0, 2.0), 1, "", "")), ValueError, "latencies: are of 2 exits, wants 3"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            retune_thresholds(*arguments, **more)
        with pytest.raises(error, match=f"^{message}"):
            replay(*arguments, NEVER, window=5)
    with pytest.raises(ValueError, match=r"max_disagreement: got 2, wants a number in \[0, 1\]"):
        retune_thresholds(log, LATENCIES, max_disagreement=2)
    with pytest.raises(TypeError, match="max_latency_ms: got 'fast', wants a number"):
        retune_thresholds(log, LATENCIES, **more, max_latency_ms="fast")
    with pytest.raises(ValueError, match="window: got 9, wants a whole number from 1, a batch, to 5"):
        replay(log, LATENCIES, NEVER, window=9)
    with pytest.raises(ValueError, match="thresholds: got 1, wants 2"):
        replay(log, LATENCIES, (1.0,), window=5)
