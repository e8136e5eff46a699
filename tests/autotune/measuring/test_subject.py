"""Subjects: thresholds of shares, and networks of random weights that tell inputs apart."""

import pytest
import torch
from auxhead.autotune.measuring.cells import SHARES, Cell, resnet_cell
from auxhead.autotune.measuring.eager_truth import measure_rounding
from auxhead.autotune.measuring.subject import build_subject, thresholds_of_shares


def exits_of(confidence, thresholds):
    """Count samples that leave at each head, and at none."""
    sure = confidence > torch.tensor(thresholds).double()[:, None]
    first = torch.where(sure.any(0), sure.int().argmax(0), len(thresholds))
    return torch.bincount(first, minlength=len(thresholds) + 1).tolist()


@pytest.mark.parametrize(
    ("samples", "shares", "wanted"),
    [
        (640, (40, 30, 20, 10), [256, 192, 128, 64]),
        (128, (40, 30, 20, 10), [51, 39, 25, 13]),
        (7, (0, 100, 0, 0), [0, 7, 0, 0]),
        (5, (0, 0, 0, 100), [0, 0, 0, 5]),
        (1, (40, 30, 20, 10), [0, 1, 0, 0]),
    ],
)
def test_thresholds_of_shares(samples, shares, wanted):
    confidence = torch.rand(3, samples, dtype=torch.float64) * 0.9 + 0.05
    assert exits_of(confidence, thresholds_of_shares(confidence, shares)) == wanted


def test_samples_of_one_confidence_stay_together():
    confidence = torch.tensor([[0.5] * 6 + [0.9] * 4, [0.3, 0.4, 0.5, 0.6, 0.7, 0.8] + [0.2] * 4]).double()
    thresholds = thresholds_of_shares(confidence, (60, 20, 20))
    assert exits_of(confidence, thresholds) == [4, 4, 2]  # at the first head four or ten may leave


@pytest.mark.parametrize("placement", ["blocks", "stages"])
def test_random_networks_answer_differently_for_every_input(placement, without_interpreter):
    taps = resnet_cell("resnet18", "float32", 8, 10, placement).taps
    subject = build_subject(Cell("resnet18", "float32", 8, 10, placement, taps, (3, 48, 48)), torch.device("cpu"))
    again = build_subject(subject.cell, torch.device("cpu"))
    assert torch.equal(subject.example, again.example)
    assert torch.equal(subject.network.backbone.fc.weight, again.network.backbone.fc.weight)
    assert len(subject.inputs) == 2 and subject.example.is_contiguous(memory_format=torch.channels_last)
    rounding = measure_rounding(subject.network, subject.inputs)
    for logits in subject.network.logits(torch.cat(subject.inputs)):
        assert logits.argmax(1).unique().numel() >= 4 and 1.0 < logits.std() < 9.0
    assert max(rounding.logit) < 1e-3
    with subject.exits("layer3.0" if placement == "blocks" else "layer3"):
        assert (subject.network(subject.example).exit_index == (4 if placement == "blocks" else 2)).all()
    with subject.exits("never"):
        assert (subject.network(subject.example).exit_index == len(taps)).all()


def test_shares_hold_in_a_network_of_random_weights(without_interpreter):
    taps = resnet_cell("resnet18", "float32", 8, 10, "inner-stages").taps
    subject = build_subject(Cell("resnet18", "float32", 8, 10, "inner-stages", taps, (3, 48, 48)), torch.device("cpu"))
    assert len(subject.inputs) == 10
    with subject.exits(SHARES):
        exits = torch.cat([subject.network(x).exit_index for x in subject.inputs])
    assert torch.bincount(exits).tolist() == [32, 24, 16, 8]


@pytest.mark.parametrize("kind", ["hidden", "norm"])
def test_heads_of_other_kinds(kind, without_interpreter):
    taps = resnet_cell("resnet18", "float32", 2, 10, "stages").taps
    cell = Cell("resnet18", "float32", 2, 10, "stages", taps, (3, 48, 48), heads=kind)
    subject = build_subject(cell, torch.device("cpu"))
    for head, channels in zip(subject.heads, (64, 128, 256, 512), strict=True):
        assert head.in_features == channels
        assert (head.hidden.linear is None, head.hidden.norm is None) == (kind == "norm", kind == "hidden")
    for logits in subject.network.logits(torch.cat(subject.inputs)):
        assert 1.0 < logits.std() < 9.0
