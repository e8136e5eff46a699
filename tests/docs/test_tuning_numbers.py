"""Results in the pages of kernels/ and autotune/ stand in the records of the repository."""

import re
import shlex

from auxhead.autotune.records.heads import RANDOM, last_runs, ratio_to, summary_of
from support.command_line import tune
from support.committed_records import BATCHES, figure, records
from support.documents import Document

TUNING = Document("autotune/README.md")
KERNELS = Document("kernels/README.md")
DEVICES = Document("docs/details/several_devices.md")
HEADS = "h200/heads.jsonl"
PEERS = ("eager", "compiled")
SIZES = {"layer1": "64x56x56", "layer2": "128x28x28", "layer3": "256x14x14", "layer4": "512x7x7"}


def test_what_explain_is_shown_to_print_is_what_it_prints():
    page = Document("docs/tune.md").text
    (command,) = re.findall(r"^    auxhead-tune (explain .+)$", page, flags=re.MULTILINE)
    shown = re.findall(r"^    (batch 8.+\n(?:    .+\n)+)", page, flags=re.MULTILINE)[0]
    printed = tune(*shlex.split(command)).output.splitlines()
    assert [line.removeprefix("    ") for line in shown.splitlines()] == printed[:3]


def head_rows(heads):
    """What the table of heads has to say: those after the stages of ResNet-18 in float16."""
    found = {}
    for measured in heads:
        cell = measured["fused"].cell
        if (cell["model"], cell["dtype"]) == ("resnet18", "float16"):
            found[cell["tap"], cell["classes"], cell["samples"]] = measured
    rows = []
    for classes in (10, 1000):
        for tap, size in SIZES.items():
            cells = [
                " / ".join(f"{measured[variant].device_us['median']:.1f}" for variant in ("fused", *PEERS))
                for measured in (found[tap, classes, batch] for batch in BATCHES)
            ]
            rows.append(f"| {tap}, {size}, {classes:,} classes | {' | '.join(cells)} |")
    return rows


def test_the_table_of_heads_is_that_of_the_record():
    heads = last_runs(records(HEADS))
    assert all(one.error is None for measured in heads for one in measured.values())
    KERNELS.has_table(
        "| one head alone, us: fused / plain / torch.compile | batch 1 | 8 | 32 | 128 |\n", head_rows(heads)
    )


def test_how_heads_compare_is_that_of_the_record():
    heads = last_runs(records(HEADS))
    plain, compiled = (sorted(measured[peer].paired[0]["device_ratio"] for measured in heads) for peer in PEERS)
    KERNELS.says(f"{plain[0]:.1f} to {plain[-1]:.1f} times faster than the plain chain")
    KERNELS.says(f"and {compiled[0]:.2f} to {compiled[-1]:.1f} times faster than torch.compile")
    first = records(HEADS)[0].cell  # measured twice
    earlier, last = [one for one in records(HEADS) if one.variant == "compiled" and one.cell == first]
    said = f"for {first['classes']:,} classes of {first['tap']} at batch {first['samples']} it took"
    then, now = earlier.device_us["median"], last.device_us["median"]
    KERNELS.says(f"{said} {then:.1f} us in an earlier one, {now:.1f} in this")
    of_bandwidth = max(head["bytes_us"] / head["us"]["fused"] for head in figure("roofline")["heads"])
    KERNELS.says(f"up to {100 * of_bandwidth:.0f} % of a copy's bandwidth")


def test_how_random_heads_compare_is_that_of_the_record():
    columns = []
    for gpu, seed, drawn, right in (("H100", 127, 400, 400), ("H200", 101, 400, 400)):
        every = last_runs(records(f"{gpu.lower()}/random-heads.jsonl.gz"), RANDOM)
        assert {one["fused"].cell["seed"] for one in every} == {seed}
        heads = [one for one in every if one["fused"].error is None]
        assert (len(every), len(heads)) == (drawn, right)
        eager, compiled = (
            summary_of([ratio_to(one, peer) for one in heads if peer in one]) for peer in ("eager", "compiled")
        )
        share = f"{100 * eager.as_fast / eager.heads:.1f} %"
        if gpu == "H100":
            said = f"of {eager.heads} [random heads](docs/details/any_head.md) {share} were at least as fast"
            Document("README.md").says(f"{said} as plain PyTorch")
        us = [{variant: one.device_us["median"] for variant, one in measured.items()} for measured in heads]
        slower = [one for one in us if one["eager"] < one["fused"]]
        columns.append([
            f"{eager.as_fast} of {eager.heads}, {share}", f"{eager.worst:.2f}, {eager.median:.2f}",
            f"{compiled.as_fast} of {compiled.heads}", f"{compiled.worst:.2f}, {compiled.median:.2f}",
            *[f"{sum(one['other way'] < one[peer] for one in slower)} of {len(slower)}" for peer in ("fused", "eager")],
        ])  # fmt: skip
    names = (
        "at least as fast as plain PyTorch", "plain PyTorch: least, median",
        "at least as fast as torch.compile, of a sample", "torch.compile: least, median",
        "slower than plain PyTorch: of these the other way is sooner", "and is sooner than plain PyTorch",
    )  # fmt: skip
    rows = [f"| {name} | {first} | {second} |" for name, first, second in zip(names, *columns, strict=True)]
    Document("docs/details/any_head.md").has_table("| | H100, seed 127 | H200, seed 101 |\n", rows)


def test_what_heads_add_to_a_trunk_is_that_of_the_record():
    us = {
        (one.cell["classes"], one.cell["batch"], one.variant): one.device_us["median"]
        for one in records("h100/bench.jsonl")
    }
    rows = []
    for classes in (10, 1000):
        over = [us[classes, n, "overlapped@cudnn"] / us[classes, n, "graph-bare@cudnn"] for n in BATCHES]
        rows.append(f"| {classes:,} | {' | '.join(f'{100 * one - 100:.1f} %' for one in over)} |")
    KERNELS.has_table("| classes | batch 1 | 8 | 32 | 128 |\n", rows)


def test_what_overlaps_is_that_of_the_record():
    earlier, *last = [one for one in records("h200/overlap.jsonl") if one.kind == "overlap"]
    found = {one.cell["batch"]: one for one in last}
    assert earlier.cell == found[32].cell
    said = {}
    for batch, one in found.items():
        alone = {pair["role"]: pair["device_us"]["median"] for pair in one.paired}
        hidden = 100 * one.measured["hiding_efficiency"]["median"]
        said[batch] = [f"{us:.0f}" for us in (alone["trunk"], alone["heads"], one.device_us["median"], hidden)]
    first = "at batch 1 the trunk takes {} us, the heads {}, both {}, so that {} % of the heads is hidden; "
    TUNING.says(first.format(*said[1]) + "at batch 32 {}, {} and {} us, {} %.".format(*said[32]))
    hidden = 100 * earlier.measured["hiding_efficiency"]["median"]
    TUNING.says(f"in an earlier run at batch 32, for which cuDNN's timing had picked another one there, {hidden:.0f} %")


def test_what_footprints_cost_is_that_of_the_figure():
    def added(batch, *kinds, least=0.0, most=100.0):
        points = figure("footprint")["batches"][str(batch)]["points"]
        its = [one for one in points if one["kind"] in kinds and least < one["occupancy_percent"] < most]
        return {one["footprint"]: round(one["added_percent"]) for one in its}

    usual = ("programs", "warps", "registers", "by rule")
    assert set(added(1, *usual).values()) == {2, 3}
    TUNING.says("Heads add 2 to 3 % at batch 1")
    few = added(1, "SMs", "priority")
    assert few["4 SMs"] == few["programs x8, same priority"] == 7
    TUNING.says("but 7 % if confined to 4 SMs, or if cut into 8 times the programs")
    assert max(one for name, one in few.items() if name not in ("4 SMs", "programs x8, same priority")) <= 3
    boundary = figure("footprint")["batches"]["32"]["boundary"]["occupancy_percent"]
    assert set(added(32, *usual, most=boundary).values()) <= {2, 3}
    TUNING.says(f"they add 2 to 3 % up to about {boundary:.1f} % of")
    most = max(added(32, *usual, least=boundary).values())
    confined = added(32, "SMs").values()
    TUNING.says(f"and up to {most} % beyond; confined to few SMs they end late and cost")
    TUNING.says(f"cost {min(confined)} to {max(confined)} %:")


PIPELINES = [one for one in records("h200/pipelines.jsonl") if one.kind == "pipeline" and one.exits == "never"]
BOTH = (120, 512)
#: Rows of the table: variants; of several split sizes the fastest.
PIPELINE_ROWS = {
    "one GPU, CUDA graph": "one-gpu",
    'one GPU, CUDA graph of trunk "cudnn"': "one-gpu-cudnn",
    "model-parallel, the tutorial's code": "model-parallel",
    "the tutorial's pipeline": "tutorial",
    "**`pipelined`**, one head": "pipelined-one-head",
    "**`pipelined`**, a head after every stage": "pipelined-heads",
}


def best(batch, variant):
    of_way = [one for one in PIPELINES if one.cell["batch"] == batch and one.variant.partition("@")[0] == variant]
    return max(of_way, key=lambda one: one.measured["images_s"]["median"])


def images_s(batch, variant):
    return best(batch, variant).measured["images_s"]["median"]


def test_the_table_of_pipelines_is_that_of_the_record():
    rows = []
    for words, variant in PIPELINE_ROWS.items():
        cells = []
        for batch in BOTH:
            measured = best(batch, variant).measured
            images = "{median:,.0f} ({p20:,.0f}-{p80:,.0f})".format(**measured["images_s"])
            cells.append(images + (f" at {measured['split_size']}" if measured["split_size"] else ""))
        rows.append(f"| {words} | {' | '.join(cells)} |")
    DEVICES.has_table("| images a second | batch 120 | batch 512 |\n", rows)


def test_ratios_of_pipelines_are_those_of_the_record():
    def over(variant, other):
        return " and ".join(f"{images_s(batch, variant) / images_s(batch, other):.2f}" for batch in BOTH)

    DEVICES.says(
        f"{over('pipelined-heads', 'model-parallel')} times as fast as model-parallel, "
        f"{over('pipelined-heads', 'tutorial')} times as fast as the tutorial's"
    )
    DEVICES.says(f"{over('pipelined-heads', 'one-gpu-cudnn')} times one GPU")
    lost = [100 * (1 - images_s(batch, "pipelined-heads") / images_s(batch, "pipelined-one-head")) for batch in BOTH]
    DEVICES.says(f"Three more heads cost {lost[0]:.1f} and {lost[1]:.1f} %")


def test_the_records_of_pipelines_are_whole_and_right():
    assert {one.environment["gpu"] for one in PIPELINES} == {"NVIDIA H200"}
    (commit,) = {one.environment["commit"] for one in PIPELINES}
    assert not commit.endswith("-dirty") and all(one.error is None for one in PIPELINES)
    assert all(one.correctness["differing"] == one.correctness["differing_near"] for one in PIPELINES)
    assert {one.cell["batch"] for one in PIPELINES} == set(BOTH) and len(PIPELINES) == 27
