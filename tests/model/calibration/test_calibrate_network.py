"""``calibrate_network`` on digits: rules that are set, numbers that plain loops find again, arguments refused."""

import functools
import json
from itertools import pairwise

import pytest
import torch
from auxhead.kernels import CRITERIA
from auxhead.model import (
    ExitLatencies,
    ExitRule,
    calibrate_network,
    measure_exit_latencies,
    sample_identities,
)
from auxhead.model.calibration.thresholds import exit_scores
from support.digits_network import batches, digits

LATENCIES = ExitLatencies((1.0, 2.0, 4.0), 4, "made up", "none")


def test_defaults_for_new_tensors_do_not_matter(network, held_out, without_interpreter):
    options = {"max_accuracy_drop": 0.03, "train": set()}
    wanted = calibrate_network(network, held_out, **options)
    network.learned_from = None
    with torch.device("meta"):
        assert calibrate_network(network, held_out, **options) == wanted


@pytest.mark.parametrize("criterion", CRITERIA)
def test_rules_are_set_and_the_network_answers_as_the_report_says(network, held_out, criterion, without_interpreter):
    images, labels = digits()
    network.set_rules(ExitRule(criterion=criterion))
    parts = {name: torch.arange(*ends) for name, ends in
             {"temperature": (0, 250), "thresholds": (250, 900), "test": (900, 1297)}.items()}  # fmt: skip
    budget = 0.1 if criterion == "patience" else 0.03  # two heads agree or do not: there is nothing stricter
    report = calibrate_network(network, held_out, max_accuracy_drop=budget, splits=parts)
    assert report.bound.reachable and report.bound.max_accuracy_drop == budget
    for rule, row in zip((head.rule for head in network.fused_heads), report.exits, strict=False):
        assert rule.temperature == row.temperature != 1.0
        assert rule.threshold == (CRITERIA[criterion].high if row.threshold is None else row.threshold)
        assert rule.criterion == row.criterion == criterion
    test_images, test_labels = images[1400:], labels[1400:]
    answer = network(test_images)
    assert report.accuracy == pytest.approx((answer.label == test_labels).double().mean().item())
    assert [row.samples for row in report.exits] == torch.bincount(answer.exit_index, minlength=3).tolist()
    assert report.mean_exit == pytest.approx(answer.exit_index.double().mean().item())
    with torch.no_grad():
        alone = [(logits.argmax(1) == test_labels).double().mean().item() for logits in network.logits(test_images)]
    assert [row.accuracy_on_all for row in report.exits] == pytest.approx(alone)
    assert report.full_accuracy == pytest.approx(alone[-1])
    assert report.accuracy_drop == pytest.approx(alone[-1] - report.accuracy)
    assert 0 < report.exits[0].share + report.exits[1].share
    with torch.no_grad():
        right = torch.stack([logits.argmax(1) == test_labels for logits in network.logits(test_images)])
    for place, row in enumerate(report.exits):
        went_on = [one for one, left in enumerate(answer.exit_index.tolist()) if left > place]
        assert row.stayed == len(went_on)
        assert row.never_right == sum(not right[place + 1 :, one].any() for one in went_on)
    early = network(images[750:1400])
    with torch.no_grad():
        classifier = network.logits(images[750:1400])[-1].argmax(1)
    lost = ((classifier == labels[750:1400]) & (early.label != labels[750:1400])).sum()
    assert report.bound.lost == report.curve[report.chosen].lost == int(lost)


def test_the_loosest_candidate_that_holds_is_taken(network, held_out):
    chosen = [
        calibrate_network(network, held_out, max_accuracy_drop=drop, confidence=confidence).chosen
        for drop, confidence in ((0.002, 0.9), (0.02, 0.99), (0.2, 0.9))
    ]
    report = calibrate_network(network, held_out, max_accuracy_drop=0.02)
    assert chosen[0] == 0 <= chosen[1] <= report.chosen <= chosen[2] > 0, "as budget and confidence allow"
    held = [point.holds for point in report.curve]
    assert report.chosen == held.index(False) - 1 > 0 and all(held[: report.chosen])
    assert all(point.p_value <= 0.1 + 1e-12 for point in report.curve[: report.chosen + 1])
    assert report.curve[report.chosen + 1].p_value > 0.1
    assert all(later.mean_exit <= earlier.mean_exit for earlier, later in pairwise(report.curve))


def test_temperatures_make_up_for_logits_that_are_too_large(network, held_out):
    first = calibrate_network(network, held_out, max_accuracy_drop=0.05)
    with torch.no_grad():
        for layer in (*(head.linear for head in network.fused_heads), network.backbone[3][1]):
            layer.weight *= 10
            layer.bias *= 10
    second = calibrate_network(network, held_out, max_accuracy_drop=0.05)
    for was, row in zip(first.exits, second.exits, strict=True):
        assert row.temperature == pytest.approx(10 * was.temperature, rel=1e-4)
        assert row.after.ece == pytest.approx(was.after.ece, abs=1e-3) and row.after.ece < row.before.ece


def test_a_latency_budget_takes_the_strictest_candidate_that_meets_it(network, held_out):
    report = calibrate_network(network, held_out, max_latency_ms=2.5, latencies=LATENCIES)
    assert report.bound.reachable and report.expected_latency_ms < 3.0
    assert report.curve[report.chosen].latency_ms < 3.0 < report.curve[0].latency_ms == 4.0
    assert 0.0 < report.bound.max_accuracy_drop < 1.0 and report.budget == {"max_latency_ms": 2.5}
    slow = calibrate_network(network, held_out, max_latency_ms=5.0, latencies=LATENCIES)
    assert slow.chosen == 0 and slow.bound.max_accuracy_drop == 0.0


def test_a_head_that_is_not_enabled_stays_so(network, held_out):
    network.set_rules({"0": ExitRule(0.5, enabled=False)})
    report = calibrate_network(network, held_out, max_accuracy_drop=0.1)
    assert [head.rule.enabled for head in network.fused_heads] == [False, True]
    assert report.exits[0].samples == 0 and report.exits[0].threshold is None and report.exits[1].samples > 0


def test_three_loaders_do_as_one_and_the_report_is_json(network, held_out):
    seen = []
    hook = network.backbone[3].register_forward_hook(lambda _module, inputs, _output: seen.append(len(inputs[0])))
    data = {"temperature": held_out[:3], "thresholds": held_out[3:9], "test": iter(held_out[9:])}
    report = calibrate_network(
        network, data, max_accuracy_drop=0.03, latencies=LATENCIES, static_model=network.backbone
    )
    hook.remove()
    assert sum(seen) == 2 * 1297 + 4 * 2 and seen.count(2) == 4, "it runs once, as does the other; twos count its work"
    assert report.samples == {"temperature": 300, "thresholds": 600, "test": 397} and report.seed is None
    assert report.static_accuracy == report.full_accuracy
    assert json.loads(json.dumps(report.to_json(), allow_nan=False)) == report.to_json()
    one = calibrate_network(
        network, held_out, max_accuracy_drop=0.03, latencies=LATENCIES, static_model=network.backbone,
        splits={"temperature": range(300), "thresholds": range(300, 900), "test": range(900, 1297)},
    )  # fmt: skip
    assert one == report


def test_training_samples_are_left_out_or_refused(network, held_out):
    images, labels = digits()
    everything = batches(images, labels)
    learned = sample_identities(everything[:5])
    for train in (learned, range(500)):
        report = calibrate_network(network, everything, max_accuracy_drop=0.05, train=train)
        assert sum(report.samples.values()) == 1297
    before = [head.rule.threshold for head in network.fused_heads]
    loaders = {"temperature": everything[5:8], "thresholds": everything[8:15], "test": everything[4:5]}
    with pytest.raises(ValueError, match="splits: train and test share 100 samples"):
        calibrate_network(network, loaders, max_accuracy_drop=0.9, train=learned)
    with pytest.raises(ValueError, match="splits: temperature and test share 100 samples"):
        calibrate_network(network, {**loaders, "test": everything[5:6]}, max_accuracy_drop=0.9)
    given = {"temperature": [501, 502], "thresholds": range(600, 900), "test": [499, 1000]}
    with pytest.raises(ValueError, match="splits: train and test share 1 samples, such as sample 499"):
        calibrate_network(network, everything, max_accuracy_drop=0.9, train=range(500), splits=given)
    assert [head.rule.threshold for head in network.fused_heads] == before


def test_a_network_is_calibrated_on_its_device(network, held_out, device, without_interpreter):
    on_cpu = calibrate_network(network, held_out, max_accuracy_drop=0.03)
    network.to(device)
    x = held_out[0][0].to(device)
    latencies = measure_exit_latencies(network, functools.partial(network, stop=True), x, rounds=2)
    assert all(one > 0 for one in latencies.milliseconds) and latencies.batch_size == len(x)
    moved = [(images.to(device), labels.to(device)) for images, labels in held_out]
    for data in (held_out, moved):
        report = calibrate_network(network, data, max_accuracy_drop=0.03, latencies=latencies)
        assert report.samples == on_cpu.samples and report.bound.reachable
        # rounding on a device may move a threshold past a sample
        assert report.mean_exit == pytest.approx(on_cpu.mean_exit, abs=0.1)
        assert [row.temperature for row in report.exits] == pytest.approx(
            [row.temperature for row in on_cpu.exits], rel=1e-3
        )


def test_what_is_no_number_is_nothing_to_be_sure_of():
    assert exit_scores(torch.full((1, 2, 3), torch.nan), ["max_prob"], [1.0]).tolist() == [[0.0, 0.0]]
