"""Heads drawn at random: which ones, what they answer, how they are measured, and the tables of them."""

import importlib
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.heads.random_heads import MOST_BYTES, draw
from auxhead.autotune.heads.tables import random_head_tables
from auxhead.autotune.measuring.failures import DeviceLost, Failure
from auxhead.autotune.measuring.peers import NaiveHead
from auxhead.autotune.records.comparison import Paired
from auxhead.autotune.records.heads import KINDS, head_in_words
from auxhead.autotune.records.record import read_records
from auxhead.kernels import LaunchConfig
from auxhead.kernels.launch.launch_config import by_library
from support.command_line import assert_one_line_error, tune
from support.head_fakes import COPIES, a_random_head, times_of
from support.pretended_gpu import ENVIRONMENT, compute_on_the_cpu

running = importlib.import_module("auxhead.autotune.heads.run_random")
head_timing = importlib.import_module("auxhead.autotune.measuring.head_timing")
DRAWN = [draw(1, number) for number in range(400)]


def test_heads_of_a_seed_stay():
    """Records name a head by its seed and number: another head there would be taken for the same one."""
    assert draw(1, 17) == DRAWN[17] and DRAWN[17] != draw(2, 17)
    assert head_in_words(DRAWN[0].cell) == head_in_words(draw(1, 0).cell)
    assert [head_in_words(draw(0, number).cell) for number in (0, 22)] == [
        "5x1298x7x7 float16; max 5x5, 1,000 classes",
        "8x197x20 float32; first token, LayerNorm, 512 gelu, 21,843 classes",
    ]


def test_all_kinds_and_sizes_are_drawn():
    assert set(Counter(head.kind for head in DRAWN)) == set(KINDS)
    for head in DRAWN:
        samples, *sizes = head.input
        assert 1 <= samples <= 256 and 2 <= head.classes <= 21_843 and max(head.bytes) <= MOST_BYTES
        channels, *sides = sizes if len(sizes) != 2 else sizes[::-1]
        assert 16 <= channels <= 2048 and head.hidden <= 1024
        assert len(sizes) < 3 or all(4 <= side <= 64 and head.pool_size <= side for side in sides)
    shared = Counter(head.dtype for head in DRAWN)
    assert shared["float16"] > shared["bfloat16"] + shared["float32"] and len(shared) == 3
    assert {head.memory_format for head in DRAWN} == {"channels_last", "contiguous"}
    assert max(Counter(head.input[0] for head in DRAWN).values()) > 50, "usual sizes come more often"
    assert {len(head.input) for head in DRAWN if head.kind == "hidden"} == {2, 3, 4}


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_each_kind_is_made_and_answers(kind, without_interpreter):
    least = min((head for head in DRAWN if head.kind == kind), key=lambda head: sum(head.bytes))
    alone, again = (least.made(torch.device("cpu")) for _ in range(2))
    assert torch.equal(alone.x, again.x) and torch.equal(alone.head.linear.weight, again.head.linear.weight)
    with torch.no_grad():
        assert alone.wrong_answer(alone.head(alone.x)) is None
        assert alone.wrong_answer(NaiveHead(alone.head)(alone.x), peer=True) is None
        assert 1.0 < alone.head.logits(alone.x).float().square().mean().sqrt() < 4.0
    planned = least.planned(torch.device("cpu"))
    assert planned.x.is_meta and (planned.shape, planned.chosen) == (alone.shape, alone.chosen)
    assert planned.bytes_moved == alone.bytes_moved


# The command, on a GPU that is none.

SMALL = [head for head in DRAWN if sum(head.bytes) < 20_000][:12]
COMMAND = ("heads", "--random", 4, "--seed", 1, "--compiled-sample", 2)


class Timing:
    """Made-up times of heads; remembers what was measured, and how."""

    protocol = {"order": "made up"}
    measured = []
    results = {}
    stopped_by = None
    eager_us = 8.0

    def __init__(self, device, heads):
        self.heads = heads

    def check_device(self):
        if Timing.stopped_by is not None:
            raise Timing.stopped_by

    def failure_of(self, error):
        return Failure.of(error)

    def against_peers(self, target, rounds, captures, begins, variants, launches):
        assert target in self.heads
        Timing.measured.append((target.taps[0], rounds, captures, launches))
        us = {"fused": 4.0, "other way": 5.0, "eager": Timing.eager_us, "compiled": 6.0}
        found = {name: Paired(times_of(us[name]), times_of(4.0), "run") for name in variants}
        return {**found, **Timing.results}


class Pool:
    """Compiles nothing, and is done with the last one first."""

    def __init__(self, capability):
        assert capability == (9, 0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def as_done(self, jobs):
        return reversed(range(len(jobs)))


@pytest.fixture
def pretended(pretended_gpu, monkeypatch):
    compute_on_the_cpu(monkeypatch, running)
    monkeypatch.setattr(running, "HeadTiming", Timing)
    monkeypatch.setattr(running, "CompilePool", Pool)
    monkeypatch.setattr(running, "draw", lambda seed, number: SMALL[number]._replace(number=number, seed=seed))
    monkeypatch.setattr(running, "time_copies", lambda device, rounds: COPIES)
    for name, value in (("measured", []), ("results", {}), ("stopped_by", None), ("eager_us", 8.0)):
        monkeypatch.setattr(Timing, name, value)
    return SimpleNamespace(path=pretended_gpu / "random-heads-nvidia-h200-fake.jsonl")


def test_random_heads_are_measured_shown_kept_and_not_measured_again(pretended):
    done = tune(*COMMAND)
    assert done.exit_code == 0, done.output
    assert Timing.measured == [(f"head {number}", 10, 3, 20) for number in (3, 1, 2, 0)], "as they are compiled"
    assert "compiling 4 heads" in done.stdout and " 75% about " in done.stdout
    plain = "Fused heads are at least as fast as plain PyTorch in 100.0 % of 4 (worst 2.00, median 2.00)"
    assert f"{plain}; as torch.compile" in done.stdout
    assert "4 random heads by kind; H200" in done.stdout and "The 4 random heads that gain least" in done.stdout
    assert "Records: autotune-records/random-heads-nvidia-h200-fake.jsonl" in done.stdout
    records = read_records(pretended.path)
    assert re.search("Measured 4 heads in [0-9]+ s", done.stdout)
    assert [record.variant for record in records[:4]] == ["fused", "other way", "eager", "bytes"]
    assert len(records) == 18
    assert {record.kind for record in records} == {"random-heads"} and records[-1].cell["number"] == 0
    assert [one.environment["clocks"] for one in records[::4]][:2] == [{"sm_mhz": 1980.0}, None]
    for record in records:
        assert record.protocol["captures"] == (1 if record.variant == "bytes" else 3)
        assert (record.protocol["rounds"], record.protocol["chain"]) == (10, 20)
    kept = pretended.path.read_bytes()
    assert tune(*COMMAND).exit_code == 0 and pretended.path.read_bytes() == kept
    assert tune("heads", "--random", 6, "--seed", 1, "--compiled-sample", 0).stdout.count("100.0%")
    assert len(Timing.measured) == 6, "the others are of the same seed"
    assert tune("table", pretended.path).stdout.startswith("The 6 random heads that")


def test_what_captures_leave_open_is_measured_for_longer(pretended, monkeypatch):
    monkeypatch.setattr(Timing, "eager_us", 4.01)
    assert tune(*COMMAND).exit_code == 0
    assert [one[1:3] for one in Timing.measured[:2]] == [(10, 3), (20, 5)]
    assert {record.protocol["rounds"] for record in read_records(pretended.path)} == {20}


def test_few_launches_of_large_heads_are_in_a_graph(pretended, monkeypatch):
    monkeypatch.setattr(running, "_CHAINED_BYTES", 1)
    assert tune(*COMMAND).exit_code == 0 and {one[3] for one in Timing.measured} == {1}


def test_wrong_answers_are_shown_and_are_the_exit_code(pretended, monkeypatch):
    wrong = Failure("wrong answer", "probabilities are off by 0.5")
    monkeypatch.setattr(Timing, "results", {"fused": wrong, "eager": Failure("no baseline", "the fused head failed")})
    done = tune(*COMMAND)
    assert done.exit_code == 1 and done.stdout.count("fused: wrong answer: probabilities are off by 0.5") == 4
    assert "no baseline:" not in done.stdout, "which says nothing more"
    monkeypatch.setattr(Timing, "results", {})
    monkeypatch.setattr(running, "environment", lambda _device: {**ENVIRONMENT, "commit": "repaired"})
    done = tune(*COMMAND)
    assert done.exit_code == 0 and "wrong answer" not in done.stdout


def test_no_memory_is_a_failure_and_a_lost_device_the_end(pretended, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(running.RandomHead, "made", full)
        done = tune(*COMMAND)
    assert done.exit_code == 1 and "fused: OutOfMemoryError: CUDA out of memory" in done.stdout
    monkeypatch.setattr(running, "environment", lambda _device: {**ENVIRONMENT, "commit": "another"})
    monkeypatch.setattr(Timing, "stopped_by", DeviceLost("the CUDA context is lost"))
    assert_one_line_error(tune(*COMMAND), "the CUDA context is lost; it is recorded: the same command goes on")


def test_one_is_measured_by_what_measures_a_networks_heads(simulated, timed_by, monkeypatch):
    # The interpreter's products round as numpy's do, on each processor otherwise: exactness has tests of its own.
    monkeypatch.setattr("auxhead.autotune.measuring.heads_alone._FLOOR_ROUNDINGS", 16)
    maps, device = [head for head in DRAWN if len(head.input) == 4], torch.device("cpu")
    drawn = min(maps, key=lambda head: sum(head.bytes))
    us = {"fused": 20.0, "other way": 25.0, "eager": 40.0, "compiled": 30.0}
    timed_by(lambda variants, device, *, rounds, repeat: {  # of all launches of a graph
        name: [[us[name]] * rounds] * len(captures) for name, captures in variants.items()
    })  # fmt: skip
    (_, head, *_), timing = running._asked(drawn, 1, device), head_timing.HeadTiming(device, {})
    results, effort = running._measured(drawn, head, timing, device)
    assert head.variants == ("fused", "other way", "eager", "compiled") and not timing.heads
    assert all(isinstance(result, Paired) for result in results.values()), results
    assert results["eager"].own == [[2.0] * 10] * 3 and effort == {"chain": 20, "rounds": 10, "captures": 3}


# Tables.


def test_the_tables_of_random_heads():
    records = [
        *a_random_head(0, ratio=3.0, compiled=1.5),
        *a_random_head(
            1, ratio=0.8, kind="flattened", pool="none", input=[8, 64, 56, 56], memory_format="channels_last"
        ),
        *a_random_head(2, ratio=0.98, kind="flattened", fused=8.0),
        *a_random_head(3, kind="hidden", hidden=128, norm=True, error="wrong answer: off"),
        *a_random_head(0, "r9", ratio=2.0, compiled=1.2),
    ]  # fmt: skip
    worst, by_kind = random_head_tables(records)
    assert [row[:7] for row in by_kind.rows] == [
        ("pooled", "1", "0", "1 of 1, 100.0%", "0", "2.00", "2.00"),
        ("flattened", "2", "0", "0 of 2, 0.0%", "1", "0.89", "0.80"),
        ("hidden", "1", "0", "-", "-", "-", "-"),
        ("all", "4", "0", "1 of 3, 33.3%", "1", "0.98", "0.80"),
    ]
    assert [row[7:] for row in by_kind.rows[::3]] == [
        ("5.0", "1 of 1, 100.0%", "1.20", "1.20", ""), ("5.0", "1 of 1, 100.0%", "1.20", "1.20", "1"),
    ]  # fmt: skip
    failed, said = by_kind.remarks
    assert failed == (
        "FAILED: number 3 of seed 0, 8x64x7x7 float16; avg, LayerNorm, 128 relu, 10 classes: fused: wrong answer: off"
    )
    assert said == (
        "Fused heads are at least as fast as plain PyTorch in 33.3 % of 3 (worst 0.80, median 0.98); "
        "as torch.compile in 100.0 % of 1 (worst 1.20, median 1.20)."
    )
    assert worst.rows[0] == (
        "1", "flattened", "8x64x56x56 float16 channels last; not pooled, 10 classes", "split", "4.00", "-", "0.80",
        "3.20", "0.80 (0.76-0.84)", "-",
    )  # fmt: skip
    assert [row[0] for row in worst.rows] == ["1", "2", "0"]
    assert random_head_tables([]) == []


@pytest.mark.parametrize(
    "config",
    [
        LaunchConfig(1, 16, 1, 64, 1, 16, 4, 16, 1, 1, 4),
        LaunchConfig(16, 64, 1, 16, 64, 64, 1, 1024, 1, 4, 4),
        LaunchConfig(16, 64, 1, 16, 64, 64, 1, 1024, 1, 1, 8, weight_buffers=3, features="packed"),
        LaunchConfig(16, 16, 8, 1, 128, 16, 8, 16, 1, 1, 4, weight_buffers=3, features="in place"),
        by_library(10),
    ],
    ids=lambda config: config.way,
)
def test_the_table_names_ways_as_explain_does(config):
    records = [replace(one, protocol={**one.protocol, "config": vars(config)}) for one in a_random_head()]
    assert random_head_tables(records)[0].rows[0][3] == config.way
