"""What heads with hidden layers cost, in model/README.md, stands in the records of the repository."""

from itertools import product

from support.committed_records import records
from support.documents import Document

PAGE = Document("model/README.md")
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


def added(record):
    """Device time, and what it is more than the trunk's of the same run."""
    (bare,) = (pair for pair in record.paired if pair["role"] == "bare")
    return f"{record.device_us['median']:.0f} (+{100 * (bare['device_ratio'] - 1):.1f} %)"


def test_the_table_is_that_of_the_records():
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
            cells = f"{bare} | {added(found['overlapped@cudnn'])} | {added(found['graph-naive@cudnn'])}"
            rows.append(f"| {words}, 8 heads in the network, batch {batch} | {cells} | - |")
    PAGE.has_table("| without heads | fused | plain PyTorch | plain / fused (99 % interval) |\n", rows)


def test_how_they_compare_with_compiled_ones_is_that_of_the_records():
    ratios = [one.paired[0]["device_ratio"] for one in ALONE if one.variant == "compiled"]
    PAGE.says(f"where it is also {min(ratios):.1f} to {max(ratios):.1f} times faster than torch.compile")


def test_the_records_are_whole_and_of_clean_commits():
    found = [*ALONE, *IN_NETWORK]
    assert {one.environment["gpu"] for one in found} == {"NVIDIA H200"}
    assert not any(one.environment["commit"].endswith("-dirty") for one in found)
    cells = {(one.cell["model"], one.cell["dtype"], one.cell["classes"]) for one in found}
    assert cells == {("resnet18", "float16", 10)}
    assert all(one.error is None for one in found)
