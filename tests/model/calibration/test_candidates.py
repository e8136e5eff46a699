"""The path of candidates goes from nobody to everybody, and no sample leaves later on the way."""

from itertools import pairwise

import pytest
import torch
from auxhead.model.calibration.thresholds import exit_indices, threshold_path


def path_of(low, high, enabled=(True, True, True), samples=80):
    generator = torch.Generator().manual_seed(1)
    unit = torch.rand(3, samples, generator=generator)
    scores = unit if high == 1.0 else 20 * unit - 10
    correct = torch.rand(4, samples, generator=generator) < torch.cat([unit**0.2, torch.full((1, samples), 0.97)])
    return scores, threshold_path(scores, correct, [(low, high)] * 3, list(enabled))


@pytest.mark.parametrize("low, high", [(0.0, 1.0), (float("-inf"), float("inf"))], ids=["share", "any-number"])
def test_from_nobody_to_everybody(low, high):
    scores, path = path_of(low, high)
    exits = torch.stack([exit_indices(scores, thresholds) for thresholds in path])
    assert (exits[0] == 3).all() and (exits[-1] == 0).all()
    for before, after in pairwise(exits):
        assert (after <= before).all()
    assert ((exits[1] < 3).double().mean() < 0.2) and len(path) > 20


def test_a_head_that_is_not_enabled_lets_nobody_go():
    scores, path = path_of(0.0, 1.0, enabled=(False, True, False))
    assert {float(one) for thresholds in path for one in thresholds[[0, 2]]} == {1.0}
    assert (exit_indices(scores, path[-1]) == 1).all()


def test_no_head_enabled_leaves_the_first_candidate_alone():
    assert len(path_of(0.0, 1.0, enabled=(False,) * 3)[1]) == 1


def test_samples_that_are_equally_sure_leave_together():
    scores = torch.full((1, 50), 0.7)
    path = threshold_path(scores, torch.ones(2, 50, dtype=torch.bool), [(0.0, 1.0)], [True])
    assert [int((scores > one[:, None]).sum()) for one in path] == [0, 50]
