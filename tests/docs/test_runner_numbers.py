"""Results of the runners, in docs/details/results.md, stand in the records."""

from support.committed_records import BATCHES, benched, records, report
from support.documents import Document

PAGE = Document("docs/details/results.md")
BENCH = "h200/bench.jsonl"


def test_nothing_failed_in_the_benchmark():
    assert all(record.error is None for record in records(BENCH))


#: The rows of the table of batch 1.
VARIANTS = {
    "what people write: eager, plain heads, `.item()` after each": "eager-naive-item@as_is",
    "eager, no heads": "eager-bare@as_is",
    "torch.compile, reduce-overhead, no heads": "compile-bare-reduce-overhead@as_is",
    "one CUDA graph, no heads": "graph-bare@as_is",
    "the same, plain heads in line": "graph-naive@as_is",
    'one CUDA graph of trunk "cudnn", no heads': "graph-bare@cudnn",
    "the same, plain heads on a side stream": "graph-naive-forked@cudnn",
    "the same, fused heads in line, not merged": "graph-fused@cudnn",
    '**`overlapped` on trunk "cudnn"**: 8 fused heads, merged': "overlapped@cudnn",
}


def test_the_table_of_one_batch_size_is_that_of_the_record():
    rows = []
    for words, variant in VARIANTS.items():
        record = benched(variant, 1)
        cells = ["{median:,.0f} ({p20:,.0f}-{p80:,.0f})".format(**us) for us in (record.host_us, record.device_us)]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    PAGE.has_table("| host to the answer, us | device, us |\n", rows)


def test_what_a_runner_takes_of_the_host_is_that_of_the_record():
    def over_device(variant, classes):
        record = benched(variant, 1, classes)
        return record.host_us["median"] - record.device_us["median"]

    more = [over_device("overlapped@cudnn", one) - over_device("graph-bare@cudnn", one) for one in (1000, 10)]
    said = " to ".join(sorted({f"{one:.0f}" for one in more}))
    PAGE.says(f"A runner takes {said} us of the host's time")


def device_us(variant, batch, classes):
    return f"{benched(variant, batch, classes).device_us['median']:,.0f}"


def over_bare(batch, classes):
    record = benched("overlapped@cudnn", batch, classes)
    (bare,) = (pair for pair in record.paired if pair["role"] == "bare")
    return f"**{record.device_us['median']:,.0f}** (+{100 * (bare['device_ratio'] - 1):.1f} %)"


def best_compiled(batch):
    """Of the modes and runs that there are; max-autotune takes minutes to compile and was not measured everywhere."""
    times = [
        record.device_us["median"]
        for record in records(BENCH)
        if record.variant.startswith("compile-bare")
        and (record.cell["model"], record.cell["dtype"], record.cell["placement"]) == ("resnet18", "float16", "blocks")
        and (record.cell["batch"], record.cell["classes"]) == (batch, 1000)
    ]
    return f"{min(times):,.0f}"


def test_the_table_of_all_batch_sizes_is_that_of_the_record():
    plain = {
        '10 classes, trunk "cudnn" without heads': "graph-bare@cudnn",
        "plain heads in line": "graph-naive@cudnn",
        "plain heads on a side stream": "graph-naive-forked@cudnn",
        "fused heads in line, not merged": "graph-fused@cudnn",
    }
    rows = [(words, [device_us(variant, batch, 10) for batch in BATCHES]) for words, variant in plain.items()]
    rows += [
        ("`overlapped`, over the trunk without heads", [over_bare(batch, 10) for batch in BATCHES]),
        (
            '1,000 classes, trunk "cudnn" without heads',
            [device_us("graph-bare@cudnn", batch, 1000) for batch in BATCHES],
        ),
        ("`overlapped`, over the trunk without heads", [over_bare(batch, 1000) for batch in BATCHES]),
        ("torch.compile of the backbone without heads, best mode", [best_compiled(batch) for batch in BATCHES]),
    ]
    wanted = [f"| {words} | {' | '.join(cells)} |" for words, cells in rows]
    PAGE.has_table("| us | batch 1 | 8 | 32 | 128 |\n", wanted)


def test_the_table_of_exits_is_that_of_the_record():
    rows = []
    for batch in (8, 32):
        for exits in ("layer1", "layer2", "layer3", "layer4", "never"):
            names = ("truncated" if exits != "never" else "graph-bare", "overlapped", "polled", "gated")
            found = [benched(f"{name}@cudnn", batch, 10, "stages", exits) for name in names]
            cells = [f"{one.host_us['median']:,.0f} / {one.device_us['median']:,.0f}" for one in found]
            rows.append(f"| {batch} | {'nowhere' if exits == 'never' else exits} | {' | '.join(cells)} |")
    PAGE.has_table("| `gated` |\n", rows)


def test_how_far_the_runs_of_exits_are_apart_is_that_of_the_records():
    exits = ("layer1", "layer2", "layer3", "layer4", "never")
    found = [benched("graph-bare@cudnn", 8, 10, "stages", each) for each in exits]
    assert len({one.run for one in found} - {benched("graph-bare@cudnn", 8, 10).run}) == len(exits)
    times = [one.host_us["median"] for one in found]
    PAGE.says(f"took the host {min(times):.0f} to {max(times):.0f} us")


def test_tables_of_different_runs_say_so():
    runs = {classes: {benched("graph-bare@cudnn", batch, classes).run for batch in BATCHES} for classes in (10, 1000)}
    assert not runs[10] & runs[1000]
    PAGE.says("Rows of 1,000 classes are of other runs than those of 10.")
    assert not {one.run for one in records("h200/eager.jsonl")} & {one.run for one in records(BENCH)}
    PAGE.says("whose eager rows are of later runs")


def test_what_open_gates_cost_is_that_of_the_record():
    gated = [  # what a gate of four adds to the trunk, for the batch sizes in turn
        (benched("gated@cudnn", batch, 10, "stages").device_us["median"] - bare.device_us["median"]) / 4
        for batch, bare in ((batch, benched("graph-bare@cudnn", batch, 10, "stages")) for batch in BATCHES)
    ]
    PAGE.says(f"{min(gated):.0f} to {max(gated):.0f} us of device time with its head, at batches of 1 to 128")


def test_what_mixed_exits_cost_is_that_of_the_record():
    compact = benched("polled-compact@cudnn", 64, 10, "inner-stages", "40/30/20/10")
    of_run = {record.variant: record.device_us["median"] for record in records(BENCH) if record.run == compact.run}
    compact, floor, overlapped = (
        of_run[f"{name}@cudnn"] for name in ("polled-compact", "segments-floor", "overlapped")
    )
    PAGE.says(f"takes {compact:.0f} us a batch, `overlapped` {overlapped:.0f}")
    PAGE.says(f"would allow {floor:.0f} us")


def test_eager_and_captured_latencies_are_those_of_the_demo():
    done = report("h200/demo-digits.json")
    assert done["environment"]["device"] == "NVIDIA H200"
    medians = {
        (row["batch"], row["mode"], row["variant"]): "{median:,.0f} ({p20:,.0f}-{p80:,.0f})".format(**row["device_us"])
        for row in done["latency"]
    }
    variants = ("no heads", "with heads", "stop once all are sure")  # the last of which no graph can
    rows = [
        f"| {batch} | {mode} | {' | '.join(medians.get((batch, mode, variant), '-') for variant in variants)} |"
        for batch in (1, 64)
        for mode in ("eager", "CUDA graph")
    ]
    PAGE.has_table("| stop once all are sure |\n", rows)


#: Rows of the table of eager calls: their variants.
EAGER = {
    "8 plain heads": "eager-naive@as_is",
    "the same, `.item()` after each": "eager-naive-item@as_is",
    "`network(images)`": "eager@as_is",
    "`network(images, stop=True)`": "eager-stop@as_is",
}


def test_what_eager_calls_take_is_that_of_the_records_of_two_gpus():
    def over_bare(variant, batch, name):
        called, bare = (benched(one, batch, name=name) for one in (variant, "eager-bare@as_is"))
        assert called.run == bare.run and not called.environment["commit"].endswith("-dirty")
        assert name[:4].upper() in called.environment["gpu"]
        return f"{called.host_us['median'] / bare.host_us['median']:.2f}"

    names = ("h200/eager.jsonl", "h100/eager.jsonl")
    rows = []
    for words, variant in EAGER.items():
        cells = [" / ".join(over_bare(variant, batch, name) for name in names) for batch in BATCHES]
        rows.append(f"| {words} | {' | '.join(cells)} |")
    PAGE.has_table("| H200 / H100 | batch 1 | 8 | 32 | 128 |\n", rows)


def test_how_far_eager_calls_spread_is_that_of_the_records():
    def spread(gpu):
        return max(one.host_us["p80"] / one.host_us["p20"] for one in records(f"{gpu}/eager.jsonl"))

    PAGE.says(f"up to {spread('h200'):.1f} times its 20th on the H200, {spread('h100'):.1f} times on the H100.")
