"""The measurer of a GPU on one: real captures and times, heads and their peers, and a quick sweep."""

from pathlib import Path

import pytest
import torch
from auxhead.autotune.heads.run import Head, HeadRecords
from auxhead.autotune.heads.run_random import run_random_heads
from auxhead.autotune.heads.tables import head_tables
from auxhead.autotune.measuring.cells import Cell, resnet_cell
from auxhead.autotune.measuring.compile_pool import CompilePool
from auxhead.autotune.measuring.environment import clocks, environment
from auxhead.autotune.measuring.head_timing import HeadTiming, time_copies
from auxhead.autotune.measuring.subject import build_subject
from auxhead.autotune.records.comparison import Paired, compare
from auxhead.autotune.records.record import read_records
from auxhead.autotune.sweep.exclusion import excluded
from auxhead.autotune.sweep.measure import Sweep
from auxhead.autotune.sweep.records import SweepRecords
from auxhead.autotune.sweep.search import STRATEGIES
from auxhead.autotune.sweep.space import neighbours, spread_out
from auxhead.kernels.launch.kernel_hash import kernel_hash
from support.example_models import needs_gpu

pytestmark = needs_gpu


@pytest.fixture
def subject():
    taps = ("layer1.0", "layer1.1", "layer4.0")
    return build_subject(Cell("resnet18", "float16", 16, 100, "own", taps, (3, 64, 64)), torch.device("cuda", 0))


def test_quick_sweep(subject, tmp_path: Path):
    """With processes that compile; asked again, all is known."""
    device, out = torch.device("cuda", 0), tmp_path / "records.jsonl"
    with CompilePool(torch.cuda.get_device_capability(device)) as pool:
        measurer = HeadTiming.of_network(subject, pool=pool)
        targets = measurer.targets
        assert [target.taps for target in targets] == [("layer1.0", "layer1.1"), ("layer4.0",)]
        assert targets[0].shape.layout == "channels_last" and targets[0].shape.dtype == "float16"
        protocol = {"kernel": kernel_hash(), **measurer.protocol}
        winners, written = [], []
        for _ in range(2):
            kept = SweepRecords(out, environment(device), protocol)
            sweep = Sweep(measurer, STRATEGIES["quick"], kept)
            sweep.run(targets[:1])
            (tuning,) = sweep.tunings
            winners.append(tuning.decision.winner)
            written.append(out.read_bytes())
    assert winners[0] is not None and winners[0] == winners[1] and written[0] == written[1]
    found = read_records(out)
    assert sum(record.error is None for record in found) >= 10, [record.error for record in found]
    assert not [record.error for record in found if record.error and "wrong answer" in record.error]


@pytest.mark.parametrize("batch", [1, 32, 128])
@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
def test_float32_by_rule_is_as_accurate_as_pytorch(model, batch):
    """Pooled features are positive and logits large, so that sums of one feature after another are off by more."""
    subject = build_subject(resnet_cell(model, "float32", batch, 1000, "stages"), torch.device("cuda", 0))
    heads = HeadTiming.of_network(subject).heads
    assert {target.taps: head.wrong(target.rule) for target, head in heads.items()} == {
        target.taps: None for target in heads
    }


def test_candidates_and_their_neighbours_answer_rightly(subject):
    measurer = HeadTiming.of_network(subject)
    for target in measurer.targets:
        candidates = spread_out(target.shape, 6)
        configs = list(dict.fromkeys([target.rule, *candidates, *neighbours(target.rule, target.shape)]))
        assert all(excluded(config, target.shape) is None for config in configs[1:])
        assert measurer.prepare(target, configs) == {}


def test_the_same_thing_twice_takes_as_long(subject):
    """Times of two sets of captures of one configuration, alone; a third of the launches is another thing."""
    measurer = HeadTiming.of_network(subject)
    target = measurer.targets[0]
    first, second = (measurer.time(target, [target.rule], 10, 3)[target.rule] for _ in range(2))
    assert isinstance(first, Paired) and isinstance(second, Paired)
    assert 0.5 < compare(first.own, second.own).median_ratio < 2.0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_heads_are_measured_against_their_peers(dtype, tmp_path: Path):
    taps, device = ("layer1.0", "layer4.0"), torch.device("cuda", 0)
    cell = Cell("resnet18", dtype, 16, 100, "own", taps, (3, 64, 64))
    timing = HeadTiming.of_network(build_subject(cell, device), "as_is")
    path = tmp_path / "heads.jsonl"
    protocol = {"kernel": kernel_hash(), **timing.protocol, "rounds": 20, "captures": 2}
    kept = HeadRecords(path, environment(device), protocol)
    copies = time_copies(device, 3)
    for target, alone in timing.heads.items():
        results = timing.against_peers(target, 20, 2, lambda _variant: None)
        assert all(isinstance(result, Paired) for result in results.values()), results
        cell = {**target.shape._asdict(), "model": target.model, "tap": ", ".join(target.taps)}
        head = Head(cell, alone.chosen, alone.bytes_moved)
        kept.add(head, results, copies, clocks(device))
        assert HeadRecords(path, kept.environment, protocol).has(head)
    assert {record.error for record in read_records(path)} == {None}
    (table,) = head_tables(read_records(path))
    assert [row[2] for row in table.rows] == list(taps) and not table.remarks
    assert not [cell for row in table.rows for cell in row if cell in ("-", "failed")]


def test_random_heads_are_measured_and_not_again(tmp_path: Path):
    path = tmp_path / "random.jsonl"
    assert run_random_heads(4, 0, 0, path) == 0
    kept = path.read_bytes()
    assert {record.error for record in read_records(path)} == {None} and len(kept.splitlines()) == 4 * 4
    assert run_random_heads(4, 0, 0, path) == 0 and path.read_bytes() == kept
