"""The README tells the truth: its snippets run, and its numbers stand in a record of the repository."""

import json
import re
from pathlib import Path

import torch
from auxhead.autotune.record import read_records

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def record(name):
    return json.loads((ROOT / "autotune" / "records" / name).read_text())


def test_snippets_run(capsys, without_interpreter):
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(snippet, names)
    assert names["answer"].label.shape == (8,) and names["out"].probs.shape == (4, 10)
    assert isinstance(names["loss"], torch.Tensor)
    assert "dict_keys(['exit1']) {}" in capsys.readouterr().out


def test_latencies_are_those_of_the_record():
    report = record("demo-digits-h200.json")
    medians = {
        (row["batch"], row["mode"], row["variant"]): "{median:,.0f} ({p20:,.0f}-{p80:,.0f})".format(**row["device_us"])
        for row in report["latency"]
    }
    variants = ("no heads", "heads in line", "heads on the side stream")
    for batch in (1, 64):
        for mode in ("eager", "CUDA graph"):
            cells = " | ".join(medians[batch, mode, variant] for variant in variants)
            assert f"| {batch} | {mode} | {cells} |" in README
    headline = [int(number) for number in re.findall(r"(\d+) us", README.replace("\n", " "))[:3]]
    assert headline == [int(medians[1, "CUDA graph", variant].split()[0]) for variant in variants]
    assert README.count(report["environment"]["device"]) >= 2


#: The rows of the benchmark's table, by their first words.
VARIANTS = {
    "what people write": "eager-naive-item@as_is",
    "eager, no heads": "eager-bare@as_is",
    "torch.compile, reduce-overhead, no heads": "compile-bare-reduce-overhead@as_is",
    "one CUDA graph, no heads": "graph-bare@as_is",
    "the same, plain heads in line": "graph-naive@as_is",
    'one CUDA graph of trunk "cudnn", no heads': "graph-bare@cudnn",
    "the same, plain heads on a side stream": "graph-naive-forked@cudnn",
    "the same, fused heads in line": "graph-fused@cudnn",
    "**`overlapped` on trunk": "overlapped@cudnn",
}


def test_the_benchmark_table_is_that_of_the_record():
    records = read_records(ROOT / "autotune" / "records" / "bench-resnet18-fp16-h200.jsonl")
    assert all(record.error is None for record in records)
    never = {record.variant: record for record in records if record.exits == "never"}
    table = README.partition("| host to the answer, us | device, us |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = table.splitlines()
    assert len(rows) == len(VARIANTS)
    for row, (words, variant) in zip(rows, VARIANTS.items(), strict=True):
        times = (never[variant].host_us, never[variant].device_us)
        cells = ["{median:,.0f} ({p20:,.0f}-{p80:,.0f})".format(**one) for one in times]
        assert row.startswith(f"| {words}") and row.endswith(f" | {cells[0]} | {cells[1]} |"), row
    bare, overlapped = (never[name].device_us["median"] for name in ("graph-bare@cudnn", "overlapped@cudnn"))
    assert f"takes {bare:.0f} us in a graph of fused convolutions, and {overlapped:.0f} us with eight heads" in README


def test_the_demo_output_is_that_of_the_record():
    report = record("demo-digits-cpu.json")
    for line in report["exits"]:
        row = next(row for row in README.splitlines() if f"│ {line['name']} " in row)
        assert f"{line['images']:,} ({line['share']:.1%})" in row and f"{line['accuracy_on_all']:.1%}" in row
    assert f"Early exit: {report['accuracy']:.2%} accuracy; full network: {report['full_accuracy']:.2%}" in README
    assert report["environment"]["device_type"] == "cpu"
    assert (
        report["accuracy"] >= 0.98 and report["accuracy_drop_points"] <= 1.0 and report["left_before_last_block"] >= 0.5
    )


def test_the_gallery_is_drawn_from_the_record():
    from auxhead.plots.exits import plot_exits

    _, drawn = plot_exits(record("demo-digits-cpu.json"))
    assert json.loads((ROOT / "plots" / "gallery" / "exits.json").read_text()) == json.loads(json.dumps(drawn))
