"""Numbers of the front page, of pages in docs/ and of the demo's output stand in records of the repository."""

import json
from itertools import product
from statistics import mean

import pytest
from auxhead.autotune.records.zoo import COMPILED
from auxhead.autotune.zoo.tables import front_page
from auxhead.plots.figures.registry import FIGURES
from support.committed_records import BATCHES, benched, records, report
from support.documents import ROOT, Document

FRONT, PICTURES, THRESHOLDS = (Document(name) for name in ("README.md", "docs/pictures.md", "docs/thresholds.md"))
HEADS, TRAINING = Document("docs/details/heads.md"), Document("docs/details/training.md")
GUARANTEES = Document("docs/details/guarantees.md")
#: Calls without a graph, all of one run at each batch size.
EAGER = {
    "eager PyTorch, no heads": "eager-bare@as_is",
    "eager PyTorch, 8 plain heads": "eager-naive@as_is",
    "the same, `.item()` after each to leave early: what people write first": "eager-naive-item@as_is",
    "**auxhead** without a runner, 8 heads: `network(images)`": "eager@as_is",
    "**auxhead** without a runner, 8 heads, asked after each: `network(images, stop=True)`": "eager-stop@as_is",
}
#: The other rows of its table, by their first words: variant, placement of the heads, where samples leave.
CAPTURED = {
    "`torch.compile` (reduce-overhead), no heads": ("compile-bare-reduce-overhead@as_is", "blocks", "never"),
    "a CUDA graph of fused convolutions, no heads": ("graph-bare@cudnn", "blocks", "never"),
    "the same with 8 plain heads": ("graph-naive@cudnn", "blocks", "never"),
    '**auxhead**, all 8 heads computed, nobody leaves (`"overlapped"`)': ("overlapped@cudnn", "blocks", "never"),
    '**auxhead**, 4 heads, all images leave at the first (`"gated"`)': ("gated@cudnn", "stages", "layer1"),
    '**auxhead**, 4 heads, nobody leaves (`"gated"`)': ("gated@cudnn", "stages", "never"),
}  # fmt: skip


def test_the_table_of_the_front_page_is_that_of_the_record():
    rows = []
    asked = {words: (variant, "blocks", "never", "h200/eager.jsonl") for words, variant in EAGER.items()}
    asked |= {words: (*which, "h200/bench.jsonl") for words, which in CAPTURED.items()}
    runs = set()
    for words, (variant, placement, exits, name) in asked.items():
        found = [benched(variant, batch, placement=placement, exits=exits, name=name) for batch in BATCHES]
        assert {len(record.cell["taps"]) for record in found} == {8 if placement == "blocks" else 4}
        assert {record.environment["gpu"] for record in found} == {"NVIDIA H200"}
        if words in EAGER:
            runs |= {record.run for record in found}
        cells = ["{median:,.0f}".format(**record.host_us) for record in found]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    assert len(runs) == len(BATCHES)
    FRONT.has_table("| | batch 1 | 8 | 32 | 128 |\n", rows)


def test_a_first_call_helps():
    """What the page says of the rows without a runner."""
    for batch in BATCHES:
        times = {
            variant: benched(variant, batch, name="h200/eager.jsonl").host_us["median"] for variant in EAGER.values()
        }
        assert times["eager@as_is"] < times["eager-naive@as_is"]
        assert times["eager-stop@as_is"] < times["eager-naive-item@as_is"]
    alone = [
        benched(f"eager-heads-{kind}@as_is", 1, name="h200/eager.jsonl").host_us["median"]
        for kind in ("naive", "fused")
    ]
    FRONT.says(
        f"Eight heads without a backbone take the host {alone[1]:.0f} us at batch 1, eight plain ones {alone[0]:.0f}."
    )


def test_the_table_of_networks_is_that_of_the_records():
    found = records(FIGURES["zoo"].file)
    assert not [one for one in found if one.environment["commit"].endswith("-dirty")]
    table = front_page(found)
    assert table in FRONT.text, f"{FRONT.name} wants:\n{table}"
    theirs = [one.measured["first_answer_s"][0] for one in found if one.variant == COMPILED]
    FRONT.says(f"torch.compile's takes {min(theirs):.0f} to {max(theirs):.0f} s.")


def test_what_early_exit_saves_is_that_of_the_record():
    found = [one for one in records("h200/pareto.jsonl") if one.measured is not None]

    def measured(batch, variant):
        return [one for one in found if one.cell["batch"] == batch and one.variant.partition("@")[0] == variant]

    (gated,) = (one.measured for one in measured(1, "gated") if one.exits == "calibrated 0 %")
    us, full = gated["mean_host_us"], measured(1, "graph-bare")[0].measured
    points = 100 * (full["accuracy"] - gated["accuracy"])
    sooner = full["mean_host_us"] / us
    FRONT.says(f"answers come {sooner:.1f} times sooner for {points:.1f} points of accuracy at batch 1")
    Document("docs/pays.md").says(
        f"at batch 1 `gated` answers in {us:.0f} us on average where the network without heads takes "
        f"{full['mean_host_us']:.0f}, for {points:.2f} points of accuracy."
    )
    later = [one for variant in ("overlapped", "polled", "gated") for one in measured(64, variant)]
    near = [one for one in later if one.measured["accuracy"] >= full["accuracy"] - 0.005]
    assert near and min(one.paired[0]["mean_host_ratio"] for one in near) > 1.0, "as both pages say of batch 64"


def test_what_is_said_of_the_demo_is_that_of_the_record():
    done = report("cpu/demo-digits.json")
    lost = round((done["full_accuracy"] - done["accuracy"]) * done["images"]["test"])
    assert (lost, done["images"]["test"], done["blocks"]) == (2, 359, 8)
    PICTURES.says("what 359 digits of a test split do")
    PICTURES.says(f"came to {done['accuracy_drop_points']:.2f} on the test split: two images of 359.")
    PICTURES.says(f"an image had its answer after {done['mean_blocks']:.1f} of 8 blocks.")
    assert done["environment"]["device_type"] == "cpu"
    assert done["accuracy"] >= 0.98 and done["accuracy_drop_points"] <= 1.0 and done["left_before_last_block"] >= 0.5


def test_what_the_front_page_says_of_the_demo():
    done = report("cpu/demo-digits.json")
    early = sum(line["share"] for line in done["exits"][:4])
    assert [line["name"] for line in done["exits"]][3] == "layer2.1" and done["blocks"] == 8
    images, accuracy, full = done["images"]["test"], 100 * done["accuracy"], 100 * done["full_accuracy"]
    FRONT.says(
        f"of {images} images that it has never seen, {100 * early:.1f} % leave in the first half of the network;"
    )
    FRONT.says(f"are right for {accuracy:.2f} % of all, where those of the full network are for {full:.2f} %.")


def test_how_often_the_bound_holds_is_that_of_the_record():
    record = json.loads((ROOT / "autotune" / "records" / "cpu" / "coverage-digits.json").read_text())
    assert [row["seed"] for row in record["repeats"]] == list(range(100))
    assert (record["max_accuracy_drop"], record["confidence"]) == (0.01, 0.9)
    for row in record["repeats"]:
        assert row["accuracy_drop"] == pytest.approx(row["full_accuracy"] - row["accuracy"])
        assert row["within"] == (row["accuracy_drop"] <= row["max_accuracy_drop"] + 1e-9)
        assert sum(row["shares"]) == pytest.approx(1.0) and len(row["shares"]) == len(record["exits"])
    assert record["within"] == sum(row["within"] for row in record["repeats"]) >= 90
    drops = [100 * row["accuracy_drop"] for row in record["repeats"]]
    beyond = [drop for drop, row in zip(drops, record["repeats"], strict=True) if not row["within"]]
    early = 100 - 100 * sum(row["shares"][-1] for row in record["repeats"]) / len(drops)
    THRESHOLDS.says(
        f"in {record['within']} the drop on the {record['samples']['test']} images of the test split was within"
    )
    THRESHOLDS.says(f"({sum(drops) / len(drops):.2f} points on average, {max(beyond):.2f} in the one that was not)")
    THRESHOLDS.says(f"{early:.1f} % of the images left early")


def test_the_ways_to_train_are_those_of_the_record():
    record = json.loads((ROOT / "autotune" / "records" / "cpu" / "trainings-digits.json").read_text())
    assert len(record["seeds"]) == 5 and record["exits"] == ["block1", "block2", "classifier"]
    means = {}
    for name, way in record["ways"].items():
        assert len(way["accuracy"]) == 5
        means[name] = [100 * sum(of_exit) / 5 for of_exit in zip(*way["accuracy"], strict=True)]
        if name == "mixed" or name.endswith("in equilibrium"):
            continue  # of which the page has a sentence
        row = "joint, images shifted: the default of `auxhead train`" if name == "joint" else name
        TRAINING.says(f"| {row} | {' | '.join(f'{mean:.1f}' for mean in means[name])} |")
    usual = means.pop("joint")
    helped = {name for name, found in means.items() if found[0] > usual[0] + 0.5}
    assert helped == {"augment none", "label smoothing 0.1", "distill", "SGD", "SGD, gradients in equilibrium"}
    assert usual[0] - means["mixed"][0] > 10.0 and means["mixed"][2] < usual[2]
    for before, begin in ((usual, ""), (means["SGD"], "SGD, ")):
        by_depth = [after - other for after, other in zip(means[f"{begin}gradients by depth"], before, strict=True)]
        assert -5.0 < by_depth[0] < -2.5 and 0.0 < by_depth[2] < 0.5
    assert all(abs(one - other) < 0.3 for one, other in zip(means["gradients in equilibrium"], usual, strict=True))
    assert all(one < other for one, other in zip(means["SGD, gradients in equilibrium"], means["SGD"], strict=True))


ALONE = records("h200/hidden-heads.jsonl")
IN_NETWORK = records("h200/hidden-bench.jsonl")
KINDS = {"hidden": "a hidden layer", "norm": "a LayerNorm"}


def alone(kind, tap, samples):
    """Records of one head by itself, by variant."""
    wanted = kind, tap, samples
    found = {
        one.variant: one for one in ALONE if tuple(one.cell[name] for name in ("heads", "tap", "samples")) == wanted
    }
    assert len({one.run for one in found.values()}) == 1
    return found


def in_network(kind, batch):
    """Records of the network with eight heads, by variant."""
    found = {one.variant: one for one in IN_NETWORK if (one.cell["heads"], one.cell["batch"]) == (kind, batch)}
    assert len({one.run for one in found.values()}) == 1 and len(found["overlapped@cudnn"].cell["taps"]) == 8
    return found


def over_bare(record):
    """Device time, and what it is more than the trunk's of the same run."""
    (bare,) = (pair for pair in record.paired if pair["role"] == "bare")
    return f"{record.device_us['median']:.0f} (+{100 * (bare['device_ratio'] - 1):.1f} %)"


def test_the_table_of_hidden_heads_is_that_of_the_records():
    rows = []
    for kind, words in KINDS.items():
        for batch, tap in product((1, 8), ("layer1", "layer2", "layer3", "layer4")):
            found = alone(kind, tap, batch)
            fused, plain = (f"{found[variant].device_us['median']:.1f}" for variant in ("fused", "eager"))
            ratio = "{device_ratio:.2f} ({low:.2f}-{high:.2f})".format(**found["eager"].paired[0])
            rows.append(f"| {words}, one head after {tap}, batch {batch} | - | {fused} | {plain} | {ratio} |")
        for batch in (1, 8):
            found = in_network(kind, batch)
            bare = f"{found['graph-bare@cudnn'].device_us['median']:.0f}"
            cells = f"{bare} | {over_bare(found['overlapped@cudnn'])} | {over_bare(found['graph-naive@cudnn'])}"
            rows.append(f"| {words}, 8 heads in the network, batch {batch} | {cells} | - |")
    HEADS.has_table("| without heads | fused | plain PyTorch | plain / fused (99 % interval) |\n", rows)


def test_how_they_compare_with_compiled_ones_is_that_of_the_records():
    ratios = [one.paired[0]["device_ratio"] for one in ALONE if one.variant == "compiled"]
    HEADS.says(f"where it is also {min(ratios):.1f} to {max(ratios):.1f} times faster than torch.compile")


def test_the_records_are_whole_and_of_clean_commits():
    found = [*ALONE, *IN_NETWORK]
    assert {one.environment["gpu"] for one in found} == {"NVIDIA H200"}
    assert not any(one.environment["commit"].endswith("-dirty") for one in found)
    cells = {(one.cell["model"], one.cell["dtype"], one.cell["classes"]) for one in found}
    assert cells == {("resnet18", "float16", 10)}
    assert all(one.error is None for one in found)


RECORD = json.loads((ROOT / "autotune" / "records" / "cpu" / "earlyon-digits.json").read_text())
WAYS = ("earlyon, two stages", "earlyon, jointly", "auxhead, linear heads", "auxhead, earlyon's heads")
HEADINGS = ("trained and calibrated by", "accuracy", "accuracy without exits", "leave early", "mean exit", "mean work")
SEEDS = 5


def over_seeds(way: str, field: str) -> float:
    return mean(row[field] for row in RECORD["rows"] if row["way"] == way)


def test_the_record_holds_every_way_with_every_seed_on_the_same_images() -> None:
    rows = RECORD["rows"]
    assert [(row["seed"], row["way"]) for row in rows] == [(seed, way) for seed in range(SEEDS) for way in WAYS]
    for row in rows:
        assert sum(row["shares"]) == pytest.approx(1.0)
        assert row["left_early"] == pytest.approx(1.0 - row["shares"][-1], abs=1e-6)
        assert row["mean_exit"] == pytest.approx(sum(i * share for i, share in enumerate(row["shares"])), abs=1e-6)
        work = sum(share * done for share, done in zip(row["shares"], RECORD["work"], strict=True))
        assert row["mean_work"] == pytest.approx(work, abs=1e-6)
        assert row["full_accuracy"] == row["accuracy_of_exits"][-1]


def test_the_table_of_earlyon_is_that_of_the_record() -> None:
    rows = []
    for way in WAYS:
        accuracies = (f"{over_seeds(way, field):.2%}" for field in ("accuracy", "full_accuracy"))
        early, work = (f"{over_seeds(way, field):.1%}" for field in ("left_early", "mean_work"))
        cells = [way, *accuracies, early, f"{over_seeds(way, 'mean_exit'):.2f}", work]
        rows.append(f"| {' | '.join(cells)} |")
    GUARANTEES.has_table(f"| {' | '.join(HEADINGS)} |\n", rows)
    GUARANTEES.says(f"{SEEDS} seeds, {RECORD['epochs']} epochs, {RECORD['images']['test']} images of the test split")
    lost = 100 * (over_seeds(WAYS[0], "full_accuracy") - over_seeds(WAYS[0], "accuracy"))
    GUARANTEES.says(f"{lost:.1f} points of that are lost by leaving")
