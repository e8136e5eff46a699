"""The guides: their length and order, commands that need no GPU, and numbers that stand in records."""

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed.run
import torchvision
from auxhead.autotune.doctor.diagnosis import find_all
from auxhead.autotune.doctor.load_trace import load_trace
from auxhead.autotune.records.record import latest
from auxhead.model import load_checkpoint
from auxhead.plots.figures.footprint import FREE_PERCENT
from support.command_line import plot, tune
from support.committed_records import benched, figure, records
from support.documents import ROOT, Document, documents, name_of, text_of

FOLDER = ROOT / "docs" / "guides"
SEVERAL_GPUS = ROOT / "docs" / "several_gpus.md"  # a task of its own, in the order of the guides
GUIDES = sorted([SEVERAL_GPUS, *(path for path in documents() if path.parent == FOLDER and path.name != "README.md")])
STEPS = Document("docs/guides/from_sum_to_max.md")
OVERLAP = Document("docs/guides/overlap_plots.md")
#: By the words behind the path of a program: those of a guide that draw or print what is committed.
PROGRAMS = {"auxhead-plot": plot, "auxhead-tune": tune}


def test_the_list_of_guides_has_each_of_them():
    listed = re.findall(
        r"^\d\. .*?\]\(([\w./]+\.(?:md|ipynb))\)", (FOLDER / "README.md").read_text(), flags=re.MULTILINE
    )
    assert sorted((FOLDER / path).resolve() for path in listed) == GUIDES


@pytest.mark.parametrize("guide", GUIDES, ids=name_of)
def test_a_guide_is_short_and_says_what_it_is_for(guide: Path):
    text = text_of(guide)
    assert 100 <= len(text.splitlines()) <= 200
    assert "**After it you" in text and "**You need**" in text and "ou should see" in text


def of_records() -> list[str]:
    """Commands that draw figures of committed records, or print tables of them."""
    lines = [line for guide in GUIDES for line in text_of(guide).splitlines() if line.startswith("    .venv/")]
    lines = [line.strip() for line in lines if "auxhead-plot" in line or " table " in line]
    return [line for line in lines if " trunks " not in line]  # which test_adding.py draws


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("command", of_records())
def test_command_runs_without_a_gpu(command, tmp_path, monkeypatch):
    (tmp_path / "autotune").symlink_to(ROOT / "autotune")
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(command)
    result = PROGRAMS[Path(program).name](*words)
    assert result.exit_code == 0, result.output
    if "--out" in words:
        out = tmp_path / words[words.index("--out") + 1]
        assert list(out.parent.glob(f"{out.name}*")), result.output


def test_what_is_hidden_is_that_of_the_record():
    found = latest(one for one in records("h200/overlap.jsonl") if one.kind == "overlap")
    (record,) = (one for one in found if one.cell["batch"] == 32)
    alone = {pair["role"]: pair["device_us"]["median"] for pair in record.paired}
    coverage, hidden = (100 * record.measured[name]["median"] for name in ("coverage", "hiding_efficiency"))
    OVERLAP.says(f"At batch 32 coverage is still {coverage:.0f} %, but {hidden:.0f} % is hidden")
    assert 2 / 3 < (record.device_us["median"] - alone["trunk"]) / alone["heads"] < 3 / 4
    batches = {one.cell["batch"] for one in records("h200/overlap.jsonl")}
    OVERLAP.says("it has the batches of {}, {} and {}.".format(*sorted(batches)))


def test_what_the_timeline_shows_is_that_of_the_figure():
    drawn = figure("timeline")
    assert "8 heads (after blocks), batch 8" in drawn["network"] and len(drawn["heads"]) == 3
    assert [len(launch["taps"]) for launch in drawn["heads"]] == [2, 2, 2]
    OVERLAP.says("Two heads share a launch, so there are three for six heads.")
    OVERLAP.says(f"this one has {drawn['sm_count']}.")
    OVERLAP.says(f"the {drawn['coverage_percent']:.0f} % in the title. Purple does not count in it.")
    overlaps = latest(one for one in records("h200/overlap.jsonl") if one.kind == "overlap")
    (batch_8,) = (one for one in overlaps if one.cell["batch"] == 8)
    stall = batch_8.measured["join_stall_us"]["median"]
    OVERLAP.says(f"It is {drawn['join_stall_us']:.1f} us here and {stall:.1f} in the table")
    (trunk,) = (pair["device_ratio"] for pair in batch_8.paired if pair["role"] == "trunk")
    OVERLAP.says(f"as a ratio, {trunk:.3f}; figures say what it adds, {100 * (trunk - 1):.1f} %.")
    gaps = sorted(after[0] - before[1] for before, after in zip(drawn["trunk"], drawn["trunk"][1:], strict=False))
    assert all(0.3 < gap < 0.6 for gap in gaps[:-1])
    OVERLAP.says(f"One near the left end is {gaps[-1]:.0f} us wide.")
    narrow = [begin for begin, _ in drawn["trunk"][2:]]
    hatched = [part[0] for launch in drawn["heads"] for part in launch["under_the_trunk"][1:]]
    assert len(hatched) == 2 and set(hatched) <= set(narrow), "each gap is one between kernels of the trunk"


def test_what_the_footprints_show_is_that_of_the_figure():
    batches = figure("footprint")["batches"]
    points = {batch: {one["footprint"]: one for one in found["points"]} for batch, found in batches.items()}
    assert batches["32"]["boundary"] is not None and batches["1"]["boundary"] is None
    usual = [one for one in points["1"].values() if one["kind"] not in ("SMs", "priority")]
    assert [one["added_low"] < FREE_PERCENT for one in usual].count(False) == 1
    surely_more = [
        (batch, name)
        for batch, found in points.items()
        for name in ("by rule", "programs x8")
        if found[f"{name}, same priority".removeprefix("by rule, ")]["added_low"] > found[name]["added_high"]
    ]
    assert surely_more == [("1", "programs x8")]
    for batch, late in (("1", ["4 SMs"]), ("32", ["4 SMs", "16 SMs", "64 SMs"])):
        found, most = points[batch], points[batch]["by rule"]["added_high"]
        assert sorted(late) == sorted(name for name in found if "SMs" in name and found[name]["added_low"] > most)


def test_tiers_of_occupancy_are_those_of_the_record():
    found = {one.variant: one for one in latest(records("h200/footprint.jsonl")) if one.cell["batch"] == 32}
    said = []
    for variant in ("by rule", "4 SMs"):
        occupancy = found[variant].measured["occupancy"]
        (theoretical,), (estimate,) = occupancy["theoretical"], occupancy["estimate"]
        residency = 100 * occupancy["residency"]["warps_share"]["median"]
        said.append(f"{100 * theoretical['share']:.0f} %, {estimate['percent']:.0f} % and {residency:.2f} %")
    OVERLAP.says(f"at batch 32: by rule {said[0]}; confined to 4 SMs ")
    assert found["4 SMs"].measured["occupancy"]["estimate"][0]["known_zero"]
    OVERLAP.says(said[1].replace("0 % and", "0 % (a 0 of the profiler for a launch that ran) and"))
    points = [one for batch in figure("footprint")["batches"].values() for one in batch["points"]]
    assert max(one["occupancy_percent"] for one in points) < 2.0
    assert max(points, key=lambda one: one["added_percent"])["footprint"] == "4 SMs"


def test_scripts_of_several_processes_run_under_torchrun(tmp_path, monkeypatch, capfd):
    """One after the other, in the same processes, to Python's own end of these: no thread may be waiting by then."""
    guide = SEVERAL_GPUS.read_text()
    scripts = ("replicas.py", "pipeline.py", "sharded.py")
    for script in scripts:
        assert f".venv/bin/torchrun --standalone --nproc-per-node 2 {script}\n" in guide
        code = guide.partition(f"Save this as `{script}`:\n\n```python\n")[2].partition("```")[0]
        (tmp_path / script).write_text(code)
    (tmp_path / "all.py").write_text(
        f"import runpy\nfor script in {scripts}:\n    runpy.run_path(script, run_name='__main__')\n"
    )
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), CUDA_VISIBLE_DEVICES="")
    os.environ.pop("TRITON_INTERPRET", None)  # the reference answers, as it does for users
    monkeypatch.chdir(tmp_path)
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        torch.distributed.run.main(["--standalone", "--nproc-per-node", "2", "all.py"])  # which is torchrun
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    done = capfd.readouterr()
    assert "terminate" not in done.err, done.err
    answered = re.findall(r"rank (\d) on cpu answers request (\d): \[", done.out)
    assert sorted(answered, key=lambda one: one[1]) == [(str(number % 2), str(number)) for number in range(6)]
    assert "Part 0 on rank 0, from the input" in done.out and "Part 1 on rank 1, behind layer" in done.out
    first, _, last = map(int, re.findall(r"\[(\d+), (\d+), (\d+)\] images at each exit", done.out)[0])
    assert min(first, last) >= 8, "samples leave in the first stage, and go through both"
    losses = {rank: [*map(float, re.findall(rf"rank {rank}: loss ([\d.]+)", done.out))] for rank in "01"}
    assert all(len(each) == 3 and each[2] < each[0] for each in losses.values()), done.out
    trained = load_checkpoint(tmp_path / "sharded-net", torchvision.models.resnet18(num_classes=10)).network
    assert trained.taps == ("layer2", "layer3")


def test_one_gpu_beat_a_pipeline():
    """As the guide on several GPUs says of two H200s; the table is that of test_tuning_numbers.py."""
    found = [one for one in records("h200/pipelines.jsonl") if one.kind == "pipeline"]
    for batch in (120, 512):
        fastest: dict[str, float] = {}
        for one in found:
            way = one.variant.partition("@")[0]
            if one.cell["batch"] == batch:
                fastest[way] = max(fastest.get(way, 0.0), one.measured["images_s"]["median"])
        ours = max(images for way, images in fastest.items() if way.startswith("pipelined"))
        assert fastest["one-gpu-cudnn"] > ours > max(fastest["model-parallel"], fastest["tutorial"])


def steps() -> dict[str, dict]:
    """What the doctor measured of each step, by the name of its target."""
    return {one.cell["target"].partition(":")[2]: one.measured for one in records("h200/doctor.jsonl")}


def test_the_table_of_steps_is_that_of_the_record():
    found = steps()
    lines = [line for line in STEPS.text.splitlines() if re.match(r"\| \d+\. ", line)]
    assert len(lines) == len(found) == 12
    in_line = {"launch-bound", "fusible-heads"}
    for line in lines:
        step, request, t1, t2, both, finds = (cell.strip() for cell in line.strip("|").split("|"))
        measured = found[step.rpartition("`")[0].rpartition("`")[2]]
        assert request == f"{measured['achieved_us']:,.0f}", step
        assert both == f"{measured['overlapped_us']:,.0f}", step
        if t2:
            assert (t1, t2) == (f"{measured['trunk_us']:,.0f}", f"{measured['side_us']:,.0f}"), step
        else:  # a graph of plain heads, which are not told from the trunk
            assert t1 == f"{measured['trunk_us']:,.0f} together" and measured["side_us"] == 0.0, step
        said = set(re.findall("`([a-z-]+)`", finds))
        said |= in_line if finds.startswith(("as in 1", "the same")) else set()
        assert said == {one["kind"] for one in measured["findings"]}, step


def test_what_is_left_over_after_a_step_is_that_of_the_record():
    one_launch, shorter = steps()["one_launch"], steps()["shorter_trunk"]
    request, t1, t2, both = (
        round(one_launch[name]) for name in ("achieved_us", "trunk_us", "side_us", "overlapped_us")
    )
    busy = t1 + t2 - both
    STEPS.says(f"Of step 8's {request} us the GPU is busy for {t1} + {t2} - {both} = {busy}, not far from")
    STEPS.says(f"max(t1, t2) = {max(t1, t2)}: ")
    STEPS.says(f"The other {request - busy} are the call, and starts between kernels.")
    STEPS.says(f"Step 9 does not come to its max of {max(shorter['trunk_us'], shorter['side_us']):.0f}")
    assert busy < 1.05 * max(t1, t2) and shorter["achieved_us"] > 1.2 * shorter["side_us"]
    in_line, graph = (f"{steps()[name]['trunk_us']:.0f}" for name in ("graph_in_line", "graphs"))
    STEPS.says(f"The kernels take {graph} us in place of {in_line}, since those")


def test_the_findings_shown_are_those_of_the_trace(tmp_path):
    (command,) = re.findall(r"^    \.venv/bin/auxhead-tune (doctor .*\.json\.gz)$", STEPS.text, flags=re.MULTILINE)
    name, trace = command.split()
    result = tune(name, "--out", str(tmp_path), str(ROOT / trace))
    shown = re.findall(r"^    (\d\. .+)$", STEPS.text, flags=re.MULTILINE)
    assert [line for line in result.output.splitlines() if re.match(r"\d\. ", line)] == shown


def test_steps_up_to_the_eighth_transpose():
    folder = ROOT / "tests" / "autotune" / "doctor" / "traces"
    last_two = {"question_shorter_trunk.json.gz", "question_real_exits.json.gz"}
    for file in folder.glob("question_*.json.gz"):
        kinds = {one.kind for one in find_all(load_trace(file))}
        assert ("layout-transposes" in kinds) is (file.name not in last_two), file.name


def test_gates_take_longer_than_all_heads_where_nobody_leaves():
    """As guides 1 and 3 say, which link to the table of test_runner_numbers.py."""
    times = {
        (runner, exits): benched(f"{runner}@cudnn", 8, 10, "stages", exits).host_us["median"]
        for runner in ("overlapped", "polled", "gated")
        for exits in ("layer1", "layer2", "layer3", "never")
    }
    for exits in ("layer1", "layer2", "layer3"):
        assert times["polled", exits] > times["gated", exits]
    assert times["gated", "never"] > times["polled", "never"] > times["overlapped", "never"]
    assert times["polled", "layer3"] > times["overlapped", "layer3"] > times["gated", "layer3"]


def test_a_trunk_with_heads_that_pool_takes_what_the_benchmark_has():
    bare, ours = (
        "{median:,.0f}".format(**benched(variant, 8, placement="blocks", exits="never").host_us)
        for variant in ("graph-bare@cudnn", "overlapped@cudnn")
    )
    STEPS.says(f"eight of them make a request of {bare} us one of {ours} ([the front page]")
    assert 3.5 < steps()["shorter_trunk"]["side_us"] / steps()["one_launch"]["side_us"] < 4.5
    STEPS.says("in which heads of flattened features take four times as long")


def test_most_of_the_trunk_is_around_its_convolutions():
    file = ROOT / "tests" / "autotune" / "doctor" / "traces" / "question_one_launch_a_head.json.gz"
    for request in load_trace(file).requests:
        trunk = [work for work in request.work if work.kind == "kernel" and not work.is_head]
        convolutions = [work for work in trunk if "fprop" in work.name or "cutlass__5x_cudnn" in work.name]
        assert len(convolutions) == 20  # of a ResNet-18
        assert sum(work.us for work in convolutions) < sum(work.us for work in trunk) / 3
    STEPS.says("More than two thirds of it are small kernels around the convolutions")


def test_code_of_the_steps_is_that_of_the_file():
    code = [line.strip() for line in (ROOT / "model" / "guides" / "steps.py").read_text().splitlines()]
    code = [line.partition("  # ")[0] for line in code]
    fences = re.findall(r"^```py\n(.*?)^```$", (FOLDER / "from_sum_to_max.md").read_text(), re.DOTALL | re.MULTILINE)
    shown = [line.strip() for fence in fences for line in fence.splitlines() if line != "..."]
    assert len(fences) == 11 and [line for line in shown if line not in code] == []


NOTEBOOKS = [guide for guide in GUIDES if guide.suffix == ".ipynb"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_a_notebook_keeps_what_its_cells_printed(notebook):
    """Each prints something, without an error, and nothing else is kept: no counts, no paths of who ran it."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(NOTEBOOKS) == 2 and len(cells) > 3
    for cell in cells:
        assert [output["output_type"] for output in cell["outputs"]] == ["stream"] and cell["execution_count"] is None
        assert cell["outputs"][0]["name"] == "stdout" and "/" not in "".join(cell["outputs"][0]["text"])
