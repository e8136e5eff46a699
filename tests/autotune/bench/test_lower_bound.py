"""The lower bound for mixed exits: launched sizes by open samples, and answers of every captured size."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.measuring.cells import NEVER
from auxhead.autotune.measuring.eager_truth import Comparison, measure_rounding, truth_of_logits, wrong_in_words
from auxhead.autotune.measuring.subject import Subject
from auxhead.model import make_trunk
from support.bench_fakes import (
    EagerSegments,
    faked_plan,
    segments,
    small_subject,
)
from support.simulated_cuda import simulated_cuda


@pytest.fixture
def mixed_subject(without_interpreter):
    """A small network in a cell in which samples of one batch leave at several exits: 40 of them."""
    subject = small_subject()
    cell = dataclasses.replace(subject.cell, placement="inner-stages")
    return Subject(cell, subject.network, tuple(torch.randn(4, 3, 16, 16) for _ in range(10)))


def test_the_floor_launches_each_segment_for_the_samples_that_are_open(mixed_subject, tmp_path, monkeypatch):
    faked_plan(tmp_path / "records.jsonl", monkeypatch)
    network, inputs = mixed_subject.network, mixed_subject.inputs[:3]
    trunk = make_trunk(network.backbone, network.taps, inputs[0])
    exits = [torch.tensor(one) for one in ([0, 3, 1, 0], [0, 0, 0, 0], [3, 3, 3, 3])]
    floor = segments.SegmentsLowerBound(trunk, network.taps, inputs, exits, (1, 3, 4))
    launched = []
    for x in inputs:
        monkeypatch.setattr(EagerSegments, "launched", [])
        assert floor(x) is x
        launched.append(EagerSegments.launched)
    # two samples are open in the second segment of the first, and no size 2 may be captured
    assert launched == [[(0, 4), (1, 3), (2, 1), (3, 1)], [(0, 4)], [(0, 4), (1, 4), (2, 4), (3, 4)]]


@pytest.mark.parametrize("kind", ["as_is", "cudnn"])
def test_every_captured_size_of_the_floor_is_checked(kind, mixed_subject):
    network, inputs = mixed_subject.network, mixed_subject.inputs[:2]
    trunk = make_trunk(network.backbone, network.taps, inputs[0], kind)
    exits = [torch.tensor([0, 3, 1, 0]), torch.tensor([3, 1, 1, 1])]
    rounding = measure_rounding(network, inputs)
    with mixed_subject.exits(NEVER), torch.no_grad():
        truths = [truth_of_logits(network.logits(x), mixed_subject.heads, rounding) for x in inputs]
    with simulated_cuda():
        floor = segments.SegmentsLowerBound(trunk, network.taps, inputs, exits, (1, 2, 4))
        comparison = Comparison()
        for x, truth in zip(inputs, truths, strict=True):
            comparison.add(floor.answer(floor(x)), truth)
        assert wrong_in_words(comparison.counts()) is None
        of_two = floor._captured[2]
        floor._captured[2] = SimpleNamespace(answer=lambda _x: of_two.answer(inputs[1][2:]))
        comparison.add(floor.answer(inputs[0]), truths[0])
    assert wrong_in_words(comparison.counts()) is not None
