"""The benchmark on a GPU: real graphs, real time, torch.compile, and a user's own network through the command."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from auxhead.autotune.bench.measure import BenchOptions, run_cell
from auxhead.autotune.bench.run import unsettled
from auxhead.autotune.measuring.cells import Cell
from auxhead.autotune.measuring.eager_truth import (
    Comparison,
    logits_of_exits,
    measure_rounding,
    truth_of_logits,
    wrong_in_words,
)
from auxhead.autotune.measuring.environment import environment
from auxhead.autotune.measuring.peers import GraphedPeer, NaiveHead, bare, forked, in_line, merged_answer, truncated
from auxhead.autotune.measuring.subject import Subject, build_subject
from auxhead.autotune.measuring.timers import time_captures
from auxhead.autotune.records.record import read_records
from auxhead.model import make_trunk
from support.command_line import tune
from support.example_models import needs_gpu

pytestmark = needs_gpu

FACTORY = """
import torch
from auxhead.model import EarlyExitNetwork
from support.example_models import SmallNet, plain_heads

def small():
    torch.manual_seed(0)
    example = torch.randn(4, 3, 16, 16, device="cuda")
    return EarlyExitNetwork(SmallNet().cuda(), plain_heads(), 0.9, example_input=None).cuda().eval(), example
"""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_a_network_of_ones_own_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factory_of_tests.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = ["--model", "factory_of_tests:small", "--rounds", "2", "--out", "records.jsonl"]
    for glob in ("eager-*", "graph-*@as_is", "compile-*-reduce-overhead@as_is"):
        options += ["--variant", glob]
    result = tune("bench", *options)
    assert result.exit_code == 0, result.output
    records = read_records(tmp_path / "records.jsonl")
    assert [(one.variant, one.error) for one in records if one.error] == []
    never = {one.variant.split("@")[0] for one in records if one.exits == "never"}
    compiled = {f"compile-{heads}-reduce-overhead" for heads in ("bare", "naive")}
    graphs = {f"graph-{name}" for name in ("bare", "naive", "naive-forked", "fused")}
    eager = {f"eager-{name}" for name in ("bare", "naive", "naive-item", "stop", "heads-naive", "heads-fused")}
    assert never == {*eager, *compiled, *graphs}
    assert {one.exits for one in records} == {"never", "block0", "block1", "block2", "own"}
    for one in records:
        assert one.host_us is not None and one.device_us is not None
        for taken in (one.host_us, one.device_us):
            assert 0 < taken["p20"] <= taken["median"] <= taken["p80"] and taken["captures"]
        assert one.correctness is not None and one.correctness["samples"] >= 16
        assert one.environment["gpu"] == torch.cuda.get_device_name() and one.paired[0]["role"] == "bare"
    again = tune("bench", *options)
    assert again.exit_code == 0 and read_records(tmp_path / "records.jsonl") == records


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("peer", [bare, in_line, forked, truncated])
def test_graphs_answer_as_the_eager_network(dtype: str, peer: object, device: torch.device) -> None:
    taps = ("layer1", "layer2", "layer3", "layer4")
    subject = build_subject(Cell("resnet18", dtype, 8, 10, "stages", taps, (3, 64, 64)), device)
    trunk = make_trunk(subject.network.backbone, taps, subject.example)
    heads = [NaiveHead(head) for head in subject.heads]
    function = {
        bare: partial(bare, trunk, taps),
        in_line: partial(in_line, trunk, taps, heads),
        forked: partial(forked, trunk, taps, heads),
        truncated: partial(truncated, trunk, taps, subject.heads, 1),
    }[peer]
    with torch.no_grad():
        function(subject.example)
    graph = GraphedPeer(function, subject.example)
    rounding = measure_rounding(subject.network, subject.inputs)
    right, stale = Comparison(), Comparison()
    pattern = "layer2" if peer is truncated else "never"
    with subject.exits(pattern):
        for x in subject.inputs:
            logits = logits_of_exits(trunk.module, taps, [head.logits for head in subject.heads], x)
            truth = truth_of_logits(logits, subject.heads, rounding)
            right.add(merged_answer(graph(x)), truth)
            stale.add(merged_answer(graph(subject.example)), truth)
    assert wrong_in_words(right.counts()) is None, right.counts()
    assert wrong_in_words(stale.counts()) is not None  # an answer for another input is told from rounding


def small_mixed_subject(device: torch.device) -> Subject:
    taps = ("layer1", "layer2", "layer3")
    return build_subject(Cell("resnet18", "float16", 8, 10, "inner-stages", taps, (3, 64, 64)), device)


def test_auto_is_measured_where_exits_mix(tmp_path: Path, device: torch.device) -> None:
    subject = small_mixed_subject(device)
    plan = BenchOptions(
        tmp_path / "records.jsonl",
        environment(device),
        rounds=4,
        wanted=("auto@cudnn",),
        exits=("never", "40*"),
    )
    ((_, runs),) = unsettled([subject.cell], plan)
    run_cell(subject, runs, plan)
    records = read_records(plan.out)
    assert [(one.variant, one.error) for one in records if one.error] == []
    measured = {(one.exits, one.variant): one for one in records}
    names = {"graph-bare@cudnn", "overlapped@cudnn", "auto@cudnn"}
    assert set(measured) == {(exits, name) for exits in ("never", "40/30/20/10") for name in names}
    auto = measured["40/30/20/10", "auto@cudnn"]
    assert sum(auto.protocol["samples_by_exit"].values()) == 80
    assert [pair["role"] for pair in auto.paired] == ["bare", "plain"]
    assert all(note.startswith(f"capture {place}: Batch 8: ") for place, note in enumerate(auto.notes[:2], start=1))


def test_time_captures(device: torch.device) -> None:
    inputs = [torch.zeros(1, device=device), torch.ones(1, device=device)]
    called: list[tuple[str, float]] = []

    def sleeper(name: str, cycles: int):  # noqa: ANN202
        def call(x: torch.Tensor) -> None:
            called.append((name, x.data_ptr()))
            torch.cuda._sleep(cycles)

        return call

    variants = {"short": [sleeper("a", 20_000), sleeper("b", 20_000)], "long": [sleeper("c", 2_000_000)]}
    samples = time_captures(variants, inputs, rounds=5, warm_up=2, repeat=4, requests=3)
    assert [len(values) for values in samples["short"].device] == [3, 2] and len(samples["long"].host[0]) == 15
    assert len(called) == 2 * 7 * (1 + 3 + 1 + 4)
    assert min(samples["long"].device[0]) > 10 * max(samples["short"].device[0])
    assert min(samples["long"].host[0]) > min(samples["long"].device[0]) * 0.9
