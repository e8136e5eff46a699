"""What pipelines over two GPUs gain, in autotune/README.md, stands in the records of the repository."""

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
    merged = [
        images_s(batch, "pipelined-exits", exits) / images_s(batch, "pipelined-one-head")
        for batch in BATCHES
        for exits in ("25/75", "50/50", "75/25")
    ]
    PAGE.says(f"was {min(merged):.2f} to {max(merged):.2f} times as fast as without exits")


def test_the_records_are_whole_and_right():
    assert {one.environment["gpu"] for one in FOUND} == {"NVIDIA H200"}
    (commit,) = {one.environment["commit"] for one in FOUND}
    assert not commit.endswith("-dirty") and all(one.error is None for one in FOUND)
    assert all(one.correctness["differing"] == one.correctness["differing_near"] for one in FOUND)
    assert {one.cell["batch"] for one in FOUND} == set(BATCHES) and len(FOUND) == 48
