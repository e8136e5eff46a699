"""Networks of several inputs are trained, calibrated, measured, saved and observed by batches as loaders yield them."""

from functools import partial

import pytest
import torch
from auxhead.model import (
    EarlyExitNetwork,
    Extract,
    FusedAuxHead,
    Retuner,
    TrainingPlan,
    accuracy_of_exits,
    attach,
    calibrate_network,
    load_checkpoint,
    measure_exit_latencies,
    sample_identities,
    save_checkpoint,
    train,
)
from support.several_inputs import CLASSES, TwoStreams, Words, streams, words
from torch.utils.data import DataLoader, StackDataset

pytestmark = pytest.mark.usefixtures("without_interpreter")
LABELS = torch.arange(12) % CLASSES


def of_streams():
    torch.manual_seed(0)
    heads = {tap: FusedAuxHead(8, CLASSES) for tap in ("pictures", "fusion")}
    return EarlyExitNetwork(TwoStreams(), heads, example_input=streams(2))


def of_words():
    torch.manual_seed(0)
    return attach(Words().eval(), ["encoder.layers.0"], example_input=words(9, 4))


def sentences(seed=0):
    """Batches of other lengths, as a collate function that pads them yields."""
    lengths = ((9, 4, 7), (5, 6, 8), (12, 11, 7), (6, 8, 8))
    return [{**words(*its, seed=seed + place), "labels": torch.arange(3)} for place, its in enumerate(lengths)]


class Opposite(Words):
    def forward(self, ids, attention_mask):
        return super().forward(ids, attention_mask > 0)


OPPOSITE = {"encoder.layers.0": Extract(mask="~attention_mask")}
FORMS = {
    "pairs": lambda: [((p, m, t), y) for p, m, t, y in DataLoader(StackDataset(*streams(12), LABELS), 4)],
    "lists": lambda: [[[p, m, t], y] for p, m, t, y in DataLoader(StackDataset(*streams(12), LABELS), 4)],
    "dicts": lambda: DataLoader(
        StackDataset(**dict(zip(("pictures", "motion", "times"), streams(12), strict=True)), label=LABELS), 4
    ),
}


def parameters(net):
    return [each.clone() for each in net.parameters()]


@pytest.mark.parametrize("method", ["joint", "heads"])
def test_forms_of_a_batch_train_the_same(method):
    trained = []
    for form in FORMS.values():
        net = of_streams()
        done = train(net, form(), TrainingPlan(method, epochs=2), validation=form())
        assert done.epochs[-1].accuracy == tuple(accuracy_of_exits(net, form()))
        trained.append(parameters(net))
    assert all(one.equal(other) for others in trained[1:] for one, other in zip(trained[0], others, strict=True))
    assert not all(one.equal(other) for one, other in zip(trained[0], of_streams().parameters(), strict=True))


def test_losses_are_those_of_a_plain_loop():
    net, plain = of_streams(), of_streams()
    losses = []
    train(net, FORMS["pairs"](), TrainingPlan(epochs=1), on_step=lambda step: losses.append(step.loss.item()))
    x, labels = FORMS["pairs"]()[0]
    plain.train()
    logits = plain.logits(x)
    wanted = torch.stack([torch.nn.functional.cross_entropy(each, labels) for each in logits]).mean()
    torch.testing.assert_close(losses[0], wanted.item())


def test_heads_learn_from_tokens_that_are_no_padding():
    """Features of the frozen backbone leave padding out: batches padded further train heads to the same numbers."""
    trained = []
    for to in (None, 20):
        net = of_words()
        batches = [{**words(5, 9, 2, seed=place, to=to), "labels": torch.arange(3)} for place in range(3)]
        train(net, batches, TrainingPlan("heads", epochs=3))
        trained.append(parameters(net.heads))
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)


def test_a_sample_is_known_whatever_its_padding():
    far = [{**words(9, 4, 7, to=30), "labels": torch.arange(3)}]
    assert sample_identities(far) == sample_identities(sentences()[:1]) and len(sample_identities(sentences())) == 12
    other = [{**far[0], "ids": far[0]["ids"] + (far[0]["ids"] < 1)}]
    assert sample_identities(other) != sample_identities(far)
    swapped = [((m, p), y) for p, m, y in [(*streams(2)[:2], LABELS[:2])]]
    assert not sample_identities(swapped) & sample_identities([((p, m), y) for (m, p), y in swapped])


def test_a_network_tells_what_padding_is():
    """Of tuples by the names of its arguments, and of masks that say the opposite, whose tokens are no padding."""
    net = of_words()
    near, far = ([(tuple(words(9, 4, 7, to=to).values()), torch.arange(3))] for to in (9, 30))
    assert sample_identities(near, net) == sample_identities(far, net) != sample_identities(near)
    x = words(9, 4)
    x = {"ids": x["ids"], "attention_mask": x["padding_mask"].long()}
    opposite = attach(Opposite().eval(), ["encoder.layers.0"], example_input=x, extract=OPPOSITE)
    other = {**x, "ids": torch.where(x["attention_mask"] == 0, 29 - x["ids"], x["ids"])}
    assert not sample_identities([(x, LABELS[:2])], opposite) & sample_identities([(other, LABELS[:2])], opposite)


def test_what_is_of_no_sample_is_noted_with_each():
    data = [
        {"pictures": p, "motion": m, "times": t, "scale": torch.tensor(2.0), "labels": y}
        for (p, m, t), y in FORMS["pairs"]()
    ]
    net = of_streams()
    train(net, data, TrainingPlan(epochs=1))
    assert [(part.role, len(part.hashes)) for part in net.learned_from.parts] == [("weights", 12)]
    assert not sample_identities(data) & sample_identities([{**data[0], "scale": torch.tensor(3.0)}])


def test_calibration_refuses_what_was_trained_on(tmp_path):
    net = of_words()
    train(net, sentences(), TrainingPlan(epochs=1))
    padded = [{**words(9, 4, 7, to=30), "labels": torch.arange(3)}]
    held_out = [one for seed in range(100, 180, 4) for one in sentences(seed)]
    report = calibrate_network(net, [*held_out, *padded], max_accuracy_drop=0.5)
    assert report.samples == calibrate_network(of_words().eval(), held_out, max_accuracy_drop=0.5).samples
    save_checkpoint(tmp_path / "saved", net, calibration=report.to_json())
    loaded = load_checkpoint(tmp_path / "saved", Words()).network.eval()
    x = words(9, 4, 7)
    with torch.no_grad():
        assert loaded(x).confidence.equal(net(x).confidence)
    times = measure_exit_latencies(loaded, loaded, x, rounds=1)
    assert times.batch_size == 3 and len(times.milliseconds) == 2
    retuner = Retuner(loaded, lambda log: (0.25,) * len(log.scores), window=6, share=1.0)
    assert retuner.observe(x) is None and retuner.observe(words(3, 2, 20)) == (0.25,)


REFUSED = {
    "no labels": ([{"ids": LABELS, "y": LABELS}], TypeError, 'yields dict of ids, y, .* labels under "labels"'),
    "both": ([{"ids": LABELS, "labels": LABELS, "label": LABELS}], TypeError, "yields dict of ids, labels, label"),
    "a triple": ([(*streams(12)[:2], LABELS)], TypeError, r"yields tuple of 3, .*: \(\(a, b\), labels\)"),
    "samples": ([(streams(3), LABELS)], ValueError, r"labels \[12\] "),
    "words": ([(("a", "b"), LABELS)], TypeError, "without a tensor"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_batches_are_refused(what):
    batches, error, message = REFUSED[what]
    for call in (partial(train, plan=TrainingPlan(epochs=1)), partial(calibrate_network, max_work=0.5)):
        net = of_streams().eval()
        with pytest.raises(error, match=message):
            call(net, batches)
