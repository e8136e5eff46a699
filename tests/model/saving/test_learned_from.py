"""What a network has learned from: noted, kept with it on all ways, and not known where it is not."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from auxhead.model import calibrate_network, load_checkpoint, sample_identities, save_checkpoint
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.network.learned_from import (
    FILE,
    NEW,
    LearnedFrom,
    Samples,
    fingerprint,
    identities,
    kind_of_input,
    learned_by,
    short,
)
from support.digits_network import batches, digits, trained_state, untrained

pytestmark = pytest.mark.usefixtures("without_interpreter")


def said(report):
    """Its sentences, wherever lines break."""
    return " ".join(str(report).split())


def samples(*numbers, kinds=(FILE,)):
    return Samples([torch.tensor(numbers)], frozenset(kinds))


def noted(network, role="weights", x=None):
    """A network that has learned from some digits, as `train` would leave it."""
    x = digits()[0][:500] if x is None else x
    own = Samples([short(identities(x))], frozenset([kind_of_input(x)]))
    network.learned_from = LearnedFrom(None, fingerprint(network)).plus(role, own)
    return network


@pytest.fixture
def network():
    made = untrained()
    made.load_state_dict(trained_state())
    return noted(made.eval())


def test_samples_have_the_earliest_of_their_roles():
    learned = LearnedFrom(None).plus("thresholds", samples(1, 2, 3)).plus("weights", samples(3, 4))
    learned = learned.plus("weights", samples(4, 5))
    assert [part.hashes.tolist() for part in learned.parts] == [[1, 2, 3], [3, 4, 5]]
    roles, unknown = learned.roles(samples(1, 3, 5, 6))
    assert roles.tolist() == [2, 0, 0, NEW] and unknown is None
    again = LearnedFrom.of_facts(Path(), json.loads(json.dumps(learned.facts())), learned.tensors())
    assert again.roles(samples(1, 3, 5, 6))[0].tolist() == [2, 0, 0, NEW] and again.facts() == learned.facts()


def test_samples_of_another_kind_cannot_be_told_from_new_ones():
    """Unless one of them is found, which shows that they were prepared alike."""
    learned = LearnedFrom(None).plus("weights", samples(1, 2))
    _, unknown = learned.roles(samples(7, 8, kinds=["float32 [3, 8, 8]"]))
    assert unknown == (
        "its weights were made from samples that were noted by their files, and these, by their values as float32 "
        "[3, 8, 8], cannot be compared with them"
    )
    roles, unknown = learned.roles(samples(2, 8, kinds=["float32 [3, 8, 8]"]))
    assert roles.tolist() == [0, NEW] and unknown is None


def test_inputs_of_several_sizes_may_be_the_same_with_other_padding():
    """The longest of a batch is found again, which says nothing of the others."""
    lengths = ["int64 [7]", "int64 [9]"]
    learned = LearnedFrom(None).plus("weights", samples(1, 2, kinds=lengths))
    for kinds in (lengths, lengths[:1]):
        roles, unknown = learned.roles(samples(2, 8, kinds=kinds))
        assert roles.tolist() == [0, NEW] and "noted by their values as int64 [7] and their values as" in unknown


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_or_another_layout_is_no_change_of_parameters(network, dtype):
    assert learned_by(network.to(memory_format=torch.channels_last)).unknown is None
    assert learned_by(network.to(dtype)).unknown is None
    assert learned_by(network.float()).unknown is None


CHANGES = {
    "a step": lambda network: network.heads[0].linear.weight.data.add_(1e-3),
    "another state": lambda network: network.load_state_dict(untrained().state_dict()),
    "another head": lambda network: setattr(network.heads[1], "linear", torch.nn.Linear(64, 10)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameters_have_learned_from_nobody_knows_what(network, change):
    network.set_rules(0.3)
    assert learned_by(copy.deepcopy(network)).unknown is None, "rules are no parameters"
    CHANGES[change](network)
    assert "have changed since" in learned_by(network).unknown


def test_it_is_saved_with_the_network_and_comes_back(network, tmp_path):
    save_checkpoint(tmp_path / "one", copy.deepcopy(network))
    once = load_checkpoint(tmp_path / "one", untrained().backbone).network
    save_checkpoint(tmp_path / "two", once)
    again = load_checkpoint(tmp_path / "two", untrained().backbone).network
    assert learned_by(again).facts() == network.learned_from.facts()
    assert torch.equal(again.learned_from.parts[0].hashes, network.learned_from.parts[0].hashes)
    save_checkpoint(tmp_path / "heads", network, with_backbone=False)
    assert learned_by(load_checkpoint(tmp_path / "heads", network.backbone).network).unknown is None
    other = load_checkpoint(tmp_path / "heads", untrained().backbone).network
    assert "have changed since" in learned_by(other).unknown, "another backbone"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parts": []}, "does not fit"),
        ({"parts": [{"role": "weights", "kinds": ["file"], "samples": 3}]}, "has a damaged learned_from"),
        ({"parts": [{"role": "weights", "kinds": ["file"], "samples": 500}] * 2}, "has a damaged learned_from"),
        ({"parts": [{"role": "fame", "kinds": ["file"], "samples": 500}]}, "has a damaged learned_from"),
        ({"parts": 3}, "has a damaged learned_from"),
        ({"parameters": 3}, "has a damaged learned_from"),
    ],
)
def test_damaged_notes_are_refused(network, tmp_path, change, message):
    save_checkpoint(tmp_path, network)
    path = tmp_path / "model.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "learned_from": {**content["learned_from"], **change}}))
    with pytest.raises(BadInput, match=message):
        load_checkpoint(tmp_path, untrained().backbone)


def test_a_second_calibration_tests_on_nothing_that_the_first_chose_with(network, tmp_path):
    """Of the same samples, and of more, with another seed, after a way over the disk."""
    images, labels = digits()
    calibrate_network(network, batches(images[500:1100], labels[500:1100]), max_accuracy_drop=0.05)
    chosen = {part.role: set(part.hashes.tolist()) for part in network.learned_from.parts}
    save_checkpoint(tmp_path, network)
    network = load_checkpoint(tmp_path, untrained().backbone).network
    report = calibrate_network(network, batches(images, labels), max_accuracy_drop=0.05, seed=3)
    assert report.samples["test"] > 0.25 * 1297 and report.bound.unknown is None
    later = {part.role: set(part.hashes.tolist()) for part in network.learned_from.parts}
    assert chosen["temperature"] <= later["temperature"] and chosen["thresholds"] <= later["thresholds"]
    assert not later["temperature"] & later["thresholds"]
    assert sum(report.samples.values()) == 1297
    same = calibrate_network(network, batches(images, labels), max_accuracy_drop=0.05, seed=4)
    assert same.samples == report.samples and same.accuracy == report.accuracy


CHANGES_SINCE = {
    "threshold": lambda network: network.set_rules({network.taps[0]: 0.3}),
    "temperature": lambda network: setattr(network.exit_heads[0].rule, "temperature", 7.0),
    "criterion": lambda network: setattr(network.exit_heads[0].rule, "criterion", "entropy"),
    "disabled": lambda network: setattr(network.exit_heads[-1].rule, "enabled", False),
    "parameters": CHANGES["a step"],
}


def test_a_report_is_saved_with_the_rules_and_parameters_that_it_is_of(network, tmp_path):
    report = calibrate_network(network, batches(*digits()), max_accuracy_drop=0.05).to_json()
    save_checkpoint(tmp_path / "one", copy.deepcopy(network).half(), calibration=report)
    loaded = load_checkpoint(tmp_path / "one", untrained().backbone)
    assert loaded.calibration == report
    save_checkpoint(tmp_path / "two", loaded.network.float(), calibration=loaded.calibration)
    for named, change in CHANGES_SINCE.items():
        changed = copy.deepcopy(network)
        change(changed)
        of = "parameters" if named == "parameters" else "rules"
        with pytest.raises(ValueError, match=f"^calibration: is of other {of} than the network has now; wants"):
            save_checkpoint(tmp_path / "three", changed, calibration=report)
        assert not (tmp_path / "three").exists()
        save_checkpoint(tmp_path / "four", changed)


def test_given_splits_with_samples_of_earlier_splits_are_refused(network):
    held = batches(*(part[500:] for part in digits()))
    given = {"temperature": range(300), "thresholds": range(300, 900), "test": range(900, 1297)}
    calibrate_network(network, held, max_accuracy_drop=0.05, splits=given)
    calibrate_network(network, held, max_accuracy_drop=0.1, splits=given)
    rules = [head.rule.threshold for head in network.exit_heads]
    learned = network.learned_from
    turned = {"temperature": range(900, 1297), "thresholds": range(300, 900), "test": range(300)}
    with pytest.raises(ValueError, match="splits: temperature of before and test share 300 samples"):
        calibrate_network(network, held, max_accuracy_drop=0.05, splits=turned)
    turned = {"temperature": range(300), "thresholds": range(900, 1297), "test": range(300, 900)}
    with pytest.raises(ValueError, match="splits: thresholds of before and test share 600 samples"):
        calibrate_network(network, held, max_accuracy_drop=0.05, splits=turned)
    everything = batches(*digits())
    with pytest.raises(ValueError, match="splits: train and temperature share 300 samples"):
        calibrate_network(network, everything, max_accuracy_drop=0.05, splits=given)
    assert rules == [head.rule.threshold for head in network.exit_heads] and network.learned_from is learned


def test_without_notes_nothing_is_promised_unless_somebody_says_what_it_learned_from(network):
    network.learned_from = None
    images, labels = digits()
    held_out = batches(images[500:], labels[500:])
    for own, train, known in ((network, None, False), (network, set(), True)):
        report = calibrate_network(copy.deepcopy(own), held_out, max_accuracy_drop=0.05, train=train)
        assert (report.bound.unknown is None) == known
        assert ("it is not known what it learned from" in said(report)) != known
        assert ("confidence, accuracy" in said(report)) == known
        assert json.loads(json.dumps(report.to_json()))["bound"]["unknown"] == report.bound.unknown
        report = calibrate_network(copy.deepcopy(own), held_out, max_accuracy_drop=1e-4, train=train)
        assert not report.bound.reachable and ("confidence they would show" in said(report)) == known
    declared = calibrate_network(network, batches(images, labels), max_work=0.9, train=sample_identities(held_out[:3]))
    assert declared.left_out == 300
    assert calibrate_network(network, batches(images, labels), max_work=0.9).left_out == 300, "it is noted"


def test_samples_in_another_type_are_not_taken_for_new_ones(network):
    images, labels = digits()
    report = calibrate_network(network.double(), batches(images.double(), labels), max_work=0.9)
    assert "by their values as float64 [1, 8, 8], cannot be compared" in report.bound.unknown


def test_a_network_at_chance_is_not_calibrated_without_a_word(network):
    images, labels = (part[500:] for part in digits())
    report = calibrate_network(network, batches(images, labels), max_accuracy_drop=0.05)
    assert report.chance is None and not said(report).startswith("The classifier")
    shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    with pytest.warns(UserWarning, match="The classifier is not shown to be better than chance: of 1,297 samples"):
        report = calibrate_network(network, batches(images, shuffled), max_accuracy_drop=0.05)
    assert said(report).startswith(f"{report.chance} Test split")
    most = shuffled.bincount().max().item() / len(shuffled)
    assert f"always would get {most:.1%}, and a random label 10.0%" in report.chance
    assert report.chance.endswith("are labels, classes and preprocessing those that it knows?")


def test_of_a_classifier_at_chance_behind_good_heads_it_is_said_that_these_are_good(network):
    """As of a frozen backbone whose new classifier was not trained."""
    images, labels = (part[500:] for part in digits())
    own = copy.deepcopy(network)
    last = [layer for layer in own.backbone.modules() if isinstance(layer, torch.nn.Linear)][-1]
    last.weight.data.zero_()
    with pytest.warns(UserWarning, match="The classifier is not shown to be better than chance: .*Heads are better: "):
        report = calibrate_network(own, batches(images, labels), max_work=0.9, train=set())
    found = re.search(
        r"Heads are better: 0 (\d\d)\.\d%, 1 (\d\d)\.\d%; is it the classifier that is not", report.chance
    )
    assert [int(share) / 100 for share in found.groups()] == pytest.approx(
        [one.accuracy_on_all for one in report.exits[:-1]], abs=0.06
    )
