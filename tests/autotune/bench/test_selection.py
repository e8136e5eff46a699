"""What the benchmark chooses, and how it tells right answers from wrong ones."""

import dataclasses

import pytest
import torch
from auxhead.autotune.bench.records import paired_with
from auxhead.autotune.bench.selection import chosen_variants
from auxhead.autotune.bench.variants import Variant, catalogue, smaller_sizes
from auxhead.autotune.measuring.cells import SHARES, Cell, chosen_cells, core_matrix, resnet_cell
from auxhead.autotune.measuring.correctness import Answer, Comparison, Truth, verdict
from auxhead.autotune.measuring.eager_truth import Rounding, measure_rounding, truth_of_logits
from auxhead.autotune.measuring.peers import HeadAnswer, PeerAnswer, merged_answer
from auxhead.autotune.measuring.subject import build_subject, thresholds_of_shares
from auxhead.model import FusedAuxHead


def test_core_matrix():
    cells = core_matrix()
    assert len(cells) == len(set(cells)) == 33
    assert {(cell.batch, cell.classes, cell.placement) for cell in cells[:16]} == {
        (batch, classes, placement) for batch in (1, 8, 32, 128) for classes in (10, 1000)
        for placement in ("blocks", "stages")
    }  # fmt: skip
    assert resnet_cell("resnet18", "float16", 1, 10, "blocks").taps == tuple(
        f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)
    )
    assert resnet_cell("resnet50", "float16", 1, 10, "stages").taps == ("layer1", "layer2", "layer3", "layer4")
    mixed = cells[-1]
    assert (mixed.batch, mixed.classes) == (64, 10) and mixed.taps == ("layer1", "layer2", "layer3")
    assert mixed.patterns == ["never", "layer1", "layer2", "layer3", "40/30/20/10"]
    assert cells[0].patterns == ["never", *cells[0].taps]
    assert smaller_sizes(64) == (8, 16, 24, 32, 40, 48, 64) and smaller_sizes(2) == (1, 2)
    names = {variant.name: variant for variant in catalogue(mixed)}
    assert names["polled-compact@cudnn"].by_default
    for other in (cells[0], dataclasses.replace(mixed, batch=1)):
        assert "polled-compact@cudnn" not in [variant.name for variant in catalogue(other)]


def exits_of(confidence, thresholds):
    """How many samples leave at each head, and how many at none."""
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


def test_chosen_cells():
    assert len(chosen_cells(quick=True)) == 2
    assert {cell.batch for cell in chosen_cells(quick=False, batches=[8], models=["resnet18"])} == {8}
    outside = chosen_cells(quick=False, models=["resnet50"], batches=[8], classes=[10], placements=["stages"])
    assert outside == [resnet_cell("resnet50", "float16", 8, 10, "stages")]
    both = chosen_cells(quick=True, dtypes=["float16", "float32"])
    assert [(cell.dtype, cell.batch) for cell in both] == [
        (dtype, n) for dtype in ("float16", "float32") for n in (1, 8)
    ]


def test_chosen_variants_bring_their_baselines():
    cell = resnet_cell("resnet18", "float16", 8, 10, "stages")
    names = [variant.name for variant in chosen_variants(cell, "layer2", ["polled@cudnn"])]
    assert names == ["graph-bare@cudnn", "truncated@cudnn", "polled@cudnn"]
    assert chosen_variants(cell, "layer2", ["compile-*"]) == []
    everything = [variant.name for variant in chosen_variants(cell, "never", [])]
    assert "compile-naive-reduce-overhead@as_is" in everything and "gated-lag1@cudnn" in everything
    assert not [name for name in everything if "max-autotune" in name or name.endswith("@inductor")]
    names = [variant.name for variant in catalogue(resnet_cell("resnet18", "float16", 32, 10, "stages"))]
    assert "compile-bare-max-autotune@as_is" in names and len(set(names)) == len(names)


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


def test_truth_says_what_lies_within_rounding():
    head = FusedAuxHead(4, 2, rule=0.75)
    logits = torch.tensor([[5.0, 0.0], [1.0986, 0.0], [0.0, 0.0], [0.0, 0.0]])  # 0.993, 0.75, 0.5, 0.5
    last = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.001], [0.0, 1.0]])
    truth = truth_of_logits([logits, last], [head], Rounding([1e-3, 1e-3], [1e-3, 1e-3]))
    assert truth.answer.label.tolist() == [0, 1, 1, 1] and truth.answer.exit_index.tolist()[0::2] == [0, 1]
    assert truth.near.tolist() == [False, True, True, False]
    assert truth.possible.tolist() == [[True, False], [False, True], [True, True], [False, True]]
    never = FusedAuxHead(4, 2, rule=1.0)  # a confidence close to 1.0 is not near a threshold that nothing exceeds
    sure = torch.tensor([[50.0, 0.0]])
    assert not truth_of_logits([sure, sure], [never], Rounding([1e-3] * 2, [1e-3] * 2)).near.any()


def test_comparison():
    right = Answer(torch.tensor([1, 2, 3, 0]), torch.full((4,), 0.5).double(), torch.tensor([0, 0, 1, 1]))
    possible = torch.eye(4, dtype=torch.bool)[right.label]
    possible[1, 0] = True  # the second sample's label may be 0 as well, the third may leave elsewhere
    truth = Truth(right, torch.tensor([False, False, True, False]), possible, torch.full((4,), 0.01))

    def counts(**changes):
        comparison = Comparison()
        comparison.add(right, truth)
        comparison.add(right._replace(**changes), truth)
        return comparison.counts()

    fine = counts(label=torch.tensor([1, 0, 3, 0]), exit_index=torch.tensor([0, 0, 0, 1]))
    assert fine == {"samples": 8, "differing": 2, "differing_near": 2, "near": 4, "confidence_off": 0}
    assert verdict(fine) is None
    assert verdict(counts(label=torch.tensor([0, 2, 3, 0]))).startswith("answers differ")
    assert "1 of 8" in verdict(counts(label=torch.tensor([1, 3, 3, 0])))
    assert "1 of 8" in verdict(counts(label=torch.tensor([1, 2, 3, 4])))
    assert "1 of 8" in verdict(counts(exit_index=torch.tensor([0, 0, 1, 0])))
    for wrong in (0.52, float("nan")):
        off = counts(confidence=torch.tensor([0.5, 0.5, 0.5, wrong]).double())
        assert off["confidence_off"] == 1 and verdict(off).startswith("confidences differ")
    assert verdict(Comparison().counts()) == "nothing was compared"
    with pytest.raises(ValueError, match=r"answers for \(3,\) samples"):
        Comparison().add(Answer(*(field[:3] for field in right)), truth)


def test_merging_takes_the_first_sure_head():
    heads = [
        HeadAnswer(torch.tensor([1, 1, 1]), torch.tensor([0.9, 0.1, 0.1]), torch.tensor([True, False, False])),
        HeadAnswer(torch.tensor([2, 2, 2]), torch.tensor([0.8, 0.8, 0.1]), torch.tensor([True, True, False])),
    ]
    answer = merged_answer(PeerAnswer(heads, torch.tensor([[9.0, 0.0]] * 3), 2))
    assert answer.label.tolist() == [1, 2, 0] and answer.exit_index.tolist() == [0, 1, 2]


def test_ratios_are_to_the_same_trunk_of_the_same_run():
    def times(host, device):
        return {"median": host}, {"median": device}

    timed = {
        "graph-bare@cudnn": times(200.0, 190.0), "truncated@cudnn": times(70.0, 60.0),
        "graph-bare@as_is": times(300.0, 290.0), "polled@cudnn": times(75.0, 66.0),
    }  # fmt: skip
    polled = Variant("polled@cudnn", lambda *_: None, "cudnn")
    bare, floor = paired_with(polled, timed)
    assert bare == {
        "role": "bare", "variant": "graph-bare@cudnn", "host_us": 200.0, "host_ratio": 75 / 200, "device_us": 190.0,
        "device_ratio": 66 / 190,
    }  # fmt: skip
    assert floor["variant"] == "truncated@cudnn" and floor["host_us"] == 70.0
    assert paired_with(polled, {"polled@cudnn": times(1.0, 1.0)}) == []
