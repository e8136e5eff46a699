"""The README: its snippets run, and its numbers stand in a record of the repository."""

import importlib
import json
import re
from io import StringIO
from pathlib import Path

import pytest
import torch
import typer
from auxhead.autotune.heads.tables import last_runs
from auxhead.autotune.profile.tables import requests_table
from auxhead.autotune.records.record import read_records
from auxhead.model.training.deep_supervision import TrainingPlan
from rich.console import Console
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
WORDS = " ".join(README.split())


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
    report = record("h200/demo-digits.json")
    medians = {
        (row["batch"], row["mode"], row["variant"]): "{median:,.0f} ({p20:,.0f}-{p80:,.0f})".format(**row["device_us"])
        for row in report["latency"]
    }
    variants = ("no heads", "heads in line", "heads on the side stream")
    for batch in (1, 64):
        for mode in ("eager", "CUDA graph"):
            cells = " | ".join(medians[batch, mode, variant] for variant in variants)
            assert f"| {batch} | {mode} | {cells} |" in README
    assert README.count(report["environment"]["device"]) >= 2


RECORDS = read_records(ROOT / "autotune" / "records" / "h200/bench.jsonl")
BATCHES = (1, 8, 32, 128)


def benched(variant, batch, classes=10, placement="blocks", exits="never"):
    """The last record of ResNet-18 in float16."""
    found = [
        record
        for record in RECORDS
        if (record.variant, record.exits) == (variant, exits)
        and (record.cell["model"], record.cell["dtype"]) == ("resnet18", "float16")
        and (record.cell["batch"], record.cell["classes"], record.cell["placement"]) == (batch, classes, placement)
    ]
    return found[-1]


def table_after(heading):
    assert README.count(heading) == 1, heading
    return README.partition(heading)[2].partition("\n\n")[0].strip().splitlines()


def test_nothing_failed_in_the_benchmark():
    assert all(record.error is None for record in RECORDS)


#: The rows of the table of one batch size, by their first words.
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


def test_the_table_of_one_batch_size_is_that_of_the_record():
    rows = table_after("| host to the answer, us | device, us |\n|---|---|---|\n")
    for row, (words, variant) in zip(rows, VARIANTS.items(), strict=True):
        record = benched(variant, 1)
        cells = ["{median:,.0f} ({p20:,.0f}-{p80:,.0f})".format(**us) for us in (record.host_us, record.device_us)]
        assert row.startswith(f"| {words}") and row.endswith(f" | {cells[0]} | {cells[1]} |"), row


def test_the_first_numbers_are_those_of_the_record():
    bare, overlapped, plain = (benched(f"{name}@cudnn", 1) for name in ("graph-bare", "overlapped", "graph-naive"))
    device = [f"{record.device_us['median']:.0f}" for record in (bare, overlapped, plain)]
    host = [f"{record.host_us['median']:.0f}" for record in (bare, overlapped, plain)]
    said = (
        "takes {} us of GPU time a call without heads and {} us with eight, where plain heads take {}; from call to "
        "answer it is {}, {} and {} us."
    )
    assert said.format(*device, *host) in WORDS


def test_what_a_runner_takes_of_the_host_is_that_of_the_record():
    def over_device(variant, classes):
        record = benched(variant, 1, classes)
        return record.host_us["median"] - record.device_us["median"]

    more = [over_device("overlapped@cudnn", one) - over_device("graph-bare@cudnn", one) for one in (1000, 10)]
    said = " to ".join(sorted({f"{one:.0f}" for one in more}))
    assert f"A runner takes {said} us of the host's time" in WORDS


def device_us(variant, batch, classes):
    return benched(variant, batch, classes).device_us["median"]


def over_bare(batch, classes):
    record = benched("overlapped@cudnn", batch, classes)
    (bare,) = (pair for pair in record.paired if pair["role"] == "bare")
    return f"**{record.device_us['median']:,.0f}** (+{100 * (bare['device_ratio'] - 1):.1f} %)"


def best_compiled(batch):
    """Of the modes and runs that there are; max-autotune takes minutes to compile and was not measured everywhere."""
    times = [
        record.device_us["median"]
        for record in RECORDS
        if record.variant.startswith("compile-bare")
        and (record.cell["model"], record.cell["dtype"], record.cell["placement"]) == ("resnet18", "float16", "blocks")
        and (record.cell["batch"], record.cell["classes"]) == (batch, 1000)
    ]
    return f"{min(times):,.0f}"


def batch_rows():
    """What the table of all batch sizes has to say."""
    plain = {
        '10 classes, trunk "cudnn" without heads': "graph-bare@cudnn",
        "plain heads in line": "graph-naive@cudnn",
        "plain heads on a side stream": "graph-naive-forked@cudnn",
        "fused heads in line, not merged": "graph-fused@cudnn",
    }
    rows = {words: [f"{device_us(name, batch, 10):,.0f}" for batch in BATCHES] for words, name in plain.items()}
    rows["`overlapped`, over the trunk without heads"] = [over_bare(batch, 10) for batch in BATCHES]
    rows['1,000 classes, trunk "cudnn" without heads'] = [
        f"{device_us('graph-bare@cudnn', batch, 1000):,.0f}" for batch in BATCHES
    ]
    rows["`overlapped`, over the trunk without heads "] = [over_bare(batch, 1000) for batch in BATCHES]
    rows["torch.compile of the backbone without heads, best mode"] = [best_compiled(batch) for batch in BATCHES]
    return [f"| {words.strip()} | {' | '.join(cells)} |" for words, cells in rows.items()]


def test_the_table_of_all_batch_sizes_is_that_of_the_record():
    assert table_after("| us | batch 1 | 8 | 32 | 128 |\n|---|---|---|---|---|\n") == batch_rows()


def exit_rows():
    """What the table of exits has to say: host to the answer / device."""
    rows = []
    for batch in (8, 32):
        for exits in ("layer1", "layer2", "layer3", "never"):
            names = ("truncated" if exits != "never" else "graph-bare", "overlapped", "polled", "gated")
            found = [benched(f"{name}@cudnn", batch, 10, "stages", exits) for name in names]
            cells = [f"{one.host_us['median']:,.0f} / {one.device_us['median']:,.0f}" for one in found]
            rows.append(f"| {batch} | {'nowhere' if exits == 'never' else exits} | {' | '.join(cells)} |")
    return rows


def test_the_table_of_exits_is_that_of_the_record():
    assert table_after("| `gated` |\n|---|---|---|---|---|---|\n") == exit_rows()


def test_what_open_gates_cost_is_that_of_the_record():
    gated = [  # what a gate of four adds to the trunk, for the batch sizes in turn
        (benched("gated@cudnn", batch, 10, "stages").device_us["median"] - bare.device_us["median"]) / 4
        for batch, bare in ((batch, benched("graph-bare@cudnn", batch, 10, "stages")) for batch in BATCHES)
    ]
    assert f"{min(gated):.0f} to {max(gated):.0f} us of device time with its head, at batches of 1 to 128" in WORDS


def test_what_mixed_exits_cost_is_that_of_the_record():
    compact = benched("polled-compact@cudnn", 64, 10, "inner-stages", "40/30/20/10")
    of_run = {record.variant: record.device_us["median"] for record in RECORDS if record.run == compact.run}
    compact, floor, overlapped = (
        of_run[f"{name}@cudnn"] for name in ("polled-compact", "segments-floor", "overlapped")
    )
    assert f"takes {compact:.0f} us a batch, `overlapped` {overlapped:.0f}" in WORDS
    assert f"would allow {floor:.0f} us" in WORDS


def figure(name):
    """What is drawn in the gallery, which test_figures.py compares with the records."""
    return json.loads((ROOT / "plots" / "gallery" / f"{name}.json").read_text())


def test_what_early_exit_saves_is_that_of_the_figure():
    panels = {panel["batch"]: panel for panel in figure("pareto")["panels"]}
    gated, full = panels[1]["runners"]["gated"], panels[1]["full"]["graph-bare"]
    place = gated["thresholds"].index("calibrated 0 %")
    us, accuracy = gated["mean_us"][place], gated["accuracy_percent"][place]
    points = full["accuracy_percent"] - accuracy
    said = f"`gated` answers in {us:.0f} us on average where the network without heads takes {full['mean_us']:.0f}"
    assert f"{said}, for {points:.2f} points of accuracy" in WORDS
    assert f"{full['mean_us'] / us:.1f} times sooner for {points:.1f} points of accuracy" in WORDS
    later = [
        ratio
        for runner in panels[64]["runners"].values()
        for ratio, its in zip(runner["over_bare"], runner["accuracy_percent"], strict=True)
        if its >= full["accuracy_percent"] - 0.5
    ]
    assert min(later) > 1.0 and "nothing is gained for half a point" in WORDS


def test_what_overlaps_is_that_of_the_record():
    earlier, *last = [
        one for one in read_records(ROOT / "autotune" / "records" / "h200/overlap.jsonl") if one.kind == "overlap"
    ]
    found = {one.cell["batch"]: one for one in last}
    assert earlier.cell == found[32].cell
    said = {}
    for batch, one in found.items():
        alone = {pair["role"]: pair["device_us"]["median"] for pair in one.paired}
        hidden = 100 * one.measured["hiding_efficiency"]["median"]
        said[batch] = [f"{us:.0f}" for us in (alone["trunk"], alone["heads"], one.device_us["median"], hidden)]
    first = "at batch 1 the trunk takes {} us, the heads {}, both {}, so that {} % of the heads is hidden; "
    assert first.format(*said[1]) + "at batch 32 {}, {} and {} us, {} %.".format(*said[32]) in WORDS
    hidden = 100 * earlier.measured["hiding_efficiency"]["median"]
    assert (
        f"in an earlier run at batch 32, for which cuDNN's timing had picked another one there, {hidden:.0f} %" in WORDS
    )


def test_what_footprints_cost_is_that_of_the_figure():
    def added(batch, *kinds, least=0.0, most=100.0):
        points = figure("footprint")["batches"][str(batch)]["points"]
        its = [one for one in points if one["kind"] in kinds and least < one["occupancy_percent"] < most]
        return {one["footprint"]: round(one["added_percent"]) for one in its}

    usual = ("programs", "warps", "registers", "by rule")
    assert set(added(1, *usual).values()) == {2, 3} and "heads add 2 to 3 % at batch 1" in WORDS
    few = added(1, "SMs", "priority")
    assert few["4 SMs"] == few["programs x8, same priority"] == 7 and "but 7 % if confined to 4 SMs, or if cut" in WORDS
    assert max(one for name, one in few.items() if name not in ("4 SMs", "programs x8, same priority")) <= 3
    boundary = figure("footprint")["batches"]["32"]["boundary"]["occupancy_percent"]
    assert set(added(32, *usual, most=boundary).values()) <= {2, 3} and f"up to about {boundary:.1f} % of" in WORDS
    most = max(added(32, *usual, least=boundary).values())
    confined = added(32, "SMs").values()
    assert f"and up to {most} % beyond; confined to few SMs they end late and cost" in WORDS
    assert f"{min(confined)} to {max(confined)} %:" in WORDS


HEADS = ROOT / "autotune" / "records" / "h200/heads.jsonl"
HEADS_HEADING = (
    "| one head alone, us: fused / plain / torch.compile | batch 1 | 8 | 32 | 128 |\n|---|---|---|---|---|\n"
)
PEERS = ("eager", "compiled")


def head_rows(heads):
    """What the table of heads has to say: those after the stages of ResNet-18 in float16."""
    found = {}
    for measured in heads:
        cell = measured["fused"].cell
        if (cell["model"], cell["dtype"]) == ("resnet18", "float16"):
            found[cell["tap"], cell["classes"], cell["samples"]] = measured
    rows = []
    for classes in (10, 1000):
        for tap, size in (
            ("layer1", "64x56x56"),
            ("layer2", "128x28x28"),
            ("layer3", "256x14x14"),
            ("layer4", "512x7x7"),
        ):
            of_batches = [found[tap, classes, batch] for batch in BATCHES]
            cells = [
                " / ".join(f"{measured[variant].device_us['median']:.1f}" for variant in ("fused", *PEERS))
                for measured in of_batches
            ]
            rows.append(f"| {tap}, {size}, {classes:,} classes | {' | '.join(cells)} |")
    return rows


def test_the_table_of_heads_is_that_of_the_record():
    heads = last_runs(read_records(HEADS))
    assert all(one.error is None for measured in heads for one in measured.values())
    assert table_after(HEADS_HEADING) == head_rows(heads)
    plain, compiled = (sorted(measured[peer].paired[0]["device_ratio"] for measured in heads) for peer in PEERS)
    assert f"{plain[0]:.1f} to {plain[-1]:.1f} times faster than the plain chain" in WORDS
    assert f"and {compiled[0]:.2f} to {compiled[-1]:.1f} times faster than torch.compile" in WORDS
    first = read_records(HEADS)[0].cell  # measured twice
    earlier, last = [one for one in read_records(HEADS) if one.variant == "compiled" and one.cell == first]
    said = f"for {first['classes']:,} classes of {first['tap']} at batch {first['samples']} it took"
    then, now = earlier.device_us["median"], last.device_us["median"]
    assert f"{said} {then:.1f} us in an earlier one, {now:.1f} in this" in WORDS
    of_bandwidth = max(head["bytes_us"] / head["us"]["fused"] for head in figure("roofline")["heads"])
    assert f"up to {100 * of_bandwidth:.0f} % of a copy's bandwidth" in WORDS


PROFILE = ROOT / "autotune" / "records" / "h200/profile.jsonl"


def test_the_table_of_a_profile_is_that_of_the_record():
    before, after = read_records(PROFILE)[-2:]
    assert (after.variant, after.environment["gpu"]) == ("overlapped@cudnn", "NVIDIA H200")
    assert after.notes == [] and before.run == after.run
    cell = after.cell
    assert (cell["dtype"], cell["batch"], cell["taps"]) == ("float16", 1, ["layer1", "layer2", "layer3"])
    printed = Console(width=80, file=StringIO())
    printed.print(requests_table([before, after]))
    wanted = "".join(f"    {line.rstrip()}\n" for line in printed.file.getvalue().splitlines())
    assert wanted in README, f"the README wants this table:\n{wanted}"


def test_the_demo_output_is_that_of_the_record():
    report = record("cpu/demo-digits.json")
    for line in report["exits"]:
        row = next(row for row in README.splitlines() if f"│ {line['name']} " in row)
        assert f"{line['images']:,} ({line['share']:.1%})" in row and f"{line['accuracy_on_all']:.1%}" in row
    assert f"Early exit: {report['accuracy']:.2%} accuracy; full network: {report['full_accuracy']:.2%}" in README
    assert report["environment"]["device_type"] == "cpu"
    assert (
        report["accuracy"] >= 0.98 and report["accuracy_drop_points"] <= 1.0 and report["left_before_last_block"] >= 0.5
    )


def test_the_gallery_is_drawn_from_the_record():
    from auxhead.plots.figures import exits

    _, drawn = exits.draw(record("cpu/demo-digits.json"))
    assert json.loads((ROOT / "plots" / "gallery" / "exits.json").read_text()) == json.loads(json.dumps(drawn))


@pytest.mark.parametrize("command", ["model", "autotune", "plots"])
def test_no_help_text_holds_what_rich_takes_for_markup(command):
    """It would be left out: defaults in words go to ``show_default``."""
    app = importlib.import_module(f"auxhead.{command}.__main__").app
    for name, subcommand in typer.main.get_command(app).commands.items():
        for option in subcommand.params:
            assert "[" not in (getattr(option, "help", None) or ""), f"{name} {option.name}: {option.help}"


def test_defaults_in_words_are_shown():
    shown = CliRunner().invoke(importlib.import_module("auxhead.model.__main__").app, ["demo", "--help"]).output
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())
    assert f"[default: ({TrainingPlan.epochs}, more for few images)]" in words
    assert "[default: (16 for the digits, else 32)]" in words
