"""What pipelines over two GPUs gain, in autotune/README.md, stands in the records of the repository."""

import statistics

import pytest
from auxhead.autotune.pipelines.simulate import predicted_images_s, request_host_ms
from auxhead.autotune.plan.devices import USUAL_HOSTS
from support.committed_records import records
from support.documents import Document

PAGE = Document("autotune/README.md")
FOUND = [one for one in records("h200/pipelines.jsonl") if one.kind == "pipeline"]
BATCHES = (120, 512)
#: Rows of the table: variant and exits; of several split sizes the fastest.
ROWS = {
    "one GPU, CUDA graph": ("one-gpu", "never"),
    'one GPU, CUDA graph of trunk "cudnn"': ("one-gpu-cudnn", "never"),
    "model-parallel, the tutorial's code": ("model-parallel", "never"),
    "the tutorial's pipeline": ("tutorial", "never"),
    "**`pipelined`**, one head": ("pipelined-one-head", "never"),
    "**`pipelined`**, a head after every stage": ("pipelined-heads", "never"),
    "the same, 25 % leave on the first GPU": ("pipelined-exits", "25/75"),
    "the same, 50 %": ("pipelined-exits", "50/50"),
    "the same, 75 %": ("pipelined-exits", "75/25"),
}


def best(batch, variant, exits):
    of_way = [one for one in FOUND if one.cell["batch"] == batch and one.exits == exits]
    of_way = [one for one in of_way if one.variant.partition("@")[0] == variant]
    return max(of_way, key=lambda one: one.measured["images_s"]["median"])


def images_s(batch, variant, exits="never"):
    return best(batch, variant, exits).measured["images_s"]["median"]


def test_the_table_is_that_of_the_record():
    rows = []
    for words, (variant, exits) in ROWS.items():
        cells = []
        for batch in BATCHES:
            measured = best(batch, variant, exits).measured
            images = "{median:,.0f} ({p20:,.0f}-{p80:,.0f})".format(**measured["images_s"])
            of_bound = f"{measured['images_s']['median'] / measured['bound_images_s']:.2f}" if "pip" in variant else "-"
            cells += [images + (f" at {measured['split_size']}" if measured["split_size"] else ""), of_bound]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    PAGE.has_table("| batch 120 | / bound | batch 512 | / bound |\n", rows)


def test_ratios_are_those_of_the_record():
    def over(variant, other, exits="never"):
        ratios = [images_s(batch, variant, exits) / images_s(batch, other) for batch in BATCHES]
        return " and ".join(f"{one:.2f}" for one in ratios)

    PAGE.says(
        f"{over('pipelined-one-head', 'model-parallel')} times as fast as model-parallel, "
        f"{over('pipelined-one-head', 'tutorial')} times as fast as the tutorial's"
    )
    PAGE.says(f"{over('pipelined-one-head', 'one-gpu-cudnn')} times one GPU")
    lost = [100 * (1 - images_s(batch, "pipelined-heads") / images_s(batch, "pipelined-one-head")) for batch in BATCHES]
    PAGE.says(f"Three more heads cost {lost[0]:.1f} and {lost[1]:.1f} %")
    PAGE.says(f"with half of the images leaving it is {over('pipelined-exits', 'pipelined-one-head', '50/50')} times")


@pytest.mark.parametrize(
    ("words", "sizes", "leaving"),
    [
        ("where nobody leaves, with micro-batches of 64 and 128", (64, 128), False),
        ("where images leave", (64, 128), True),
        ("with micro-batches of 20 and 40", (20, 40), None),
    ],
)
def test_predictions_are_as_near_as_is_said(words, sizes, leaving):
    ratios = []
    for one in FOUND:
        measured = one.measured
        counts = leaving is None or leaving == (one.exits != "never")
        if one.variant.startswith("pipelined") and measured["split_size"] in sizes and counts:
            predicted = predicted_images_s(one.cell["batch"], measured["split_size"], measured["pieces"])
            ratios.append(measured["images_s"]["median"] / predicted)
    PAGE.says(f"{min(ratios):.2f} to {max(ratios):.2f} {words}")


def besides_ms(measured, pieces):
    """What a request takes besides its graphs, links and hosts."""
    size = measured["split_size"]
    alone = {**pieces, "leave": [0.0, 1.0], "request_ms": 0.0}
    return measured["pieces"]["request_ms"] - size / predicted_images_s(size, size, alone) * 1e3


def with_hosts_that_take_no_time(measured):
    """Images a second by the simulation."""
    pieces = measured["pieces"]
    none = {**pieces, "launch_ms": [0.0, 0.0], "hand_on_ms": [0.0, 0.0]}
    none["request_ms"] -= besides_ms(measured, none) - besides_ms(measured, pieces)
    return predicted_images_s(measured["batch"], measured["split_size"], none)


def test_what_the_simulation_says_is_what_it_says():
    by_way = {
        way: [
            one.measured
            for one in FOUND
            if (one.variant.partition("@")[0], one.exits, one.cell["batch"]) == (*way, 512)
        ]
        for way in (("pipelined-exits", "50/50"), ("pipelined-one-head", "never"))
    }
    exits, none = (max(map(with_hosts_that_take_no_time, of_way)) for of_way in by_way.values())
    PAGE.says(f"would be {exits / none:.1f} times at batch 512, by the simulation")
    besides = [besides_ms(one, one["pieces"]) for of_way in by_way.values() for one in of_way]
    PAGE.says(f"to come back, {min(besides):.1f} to {max(besides):.1f} ms")


def test_what_hosts_take_is_that_of_the_record():
    pieces = [one.measured["pieces"] for one in FOUND if one.variant == "pipelined-exits@64"][0]
    host, graph = pieces["launch_ms"][0] + pieces["hand_on_ms"][0], pieces["graph_ms"][0]
    PAGE.says(f"takes {host:.2f} ms for a micro-batch of 64, its GPU {graph:.2f}")


def test_the_records_are_whole_and_right():
    assert {one.environment["gpu"] for one in FOUND} == {"NVIDIA H200"}
    (commit,) = {one.environment["commit"] for one in FOUND}
    assert not commit.endswith("-dirty") and all(one.error is None for one in FOUND)
    assert all(one.correctness["differing"] == one.correctness["differing_near"] for one in FOUND)
    assert {one.cell["batch"] for one in FOUND} == set(BATCHES) and len(FOUND) == 48


def test_hosts_that_plans_assume_are_those_of_the_record():
    of_sizes = [(one.measured["split_size"], one.measured["pieces"]) for one in FOUND if one.measured.get("pieces")]
    distinct = {str(pieces["graph_ms"]): (size, pieces) for size, pieces in of_sizes}.values()
    hand_on_ms = [ms for _, pieces in distinct for ms in pieces["hand_on_ms"]]
    request_ms = [request_host_ms(size, pieces) for size, pieces in distinct]
    assert USUAL_HOSTS == tuple(round(statistics.median(each), 2) for each in (hand_on_ms, request_ms))
