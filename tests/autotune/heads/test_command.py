"""The command ``auxhead-tune heads`` without a GPU: what it measures, shows and refuses."""

import importlib
from types import SimpleNamespace

import pytest
from auxhead.autotune.measuring.failures import DeviceLost, Failure
from auxhead.autotune.measuring.heads_alone import PEERS
from auxhead.autotune.records.record import read_records
from support.command_line import assert_one_line_error, tune
from support.head_fakes import COPIES, a_head, timed
from support.sweep_fakes import small_target
from support.written_records import written

running = importlib.import_module("auxhead.autotune.heads.run")


class Timing:
    """Made-up times of a network's two shapes of heads; remembers what was measured."""

    measured = []
    results = timed()
    stopped_by = None
    protocol = {"chain": 20, "place": "alone"}

    def __init__(self, cell):
        sizes = ((64, 49, ("layer1", "layer2")), (32, 25, ("layer3",)))
        targets = [small_target(cell.batch, *size, cell.classes, taps) for *size, taps in sizes]
        self.heads = {target: SimpleNamespace(chosen=target.rule, bytes_moved=10_000) for target in targets}

    @classmethod
    def of_network(cls, cell, trunk):
        assert trunk == "as_is"
        return cls(cell)

    def against_peers(self, target, rounds, captures, begins):
        assert (rounds, captures) == (20, 5) and target in self.heads
        for variant in PEERS:
            begins(variant)
        if Timing.stopped_by is not None:
            raise Timing.stopped_by
        Timing.measured.append((target.shape.samples, target.taps))
        return Timing.results


@pytest.fixture
def pretended(pretended_gpu, monkeypatch):
    monkeypatch.setattr(running, "HeadTiming", Timing)
    copies = []
    monkeypatch.setattr(running, "time_copies", lambda device, rounds: copies.append(device) or COPIES)
    for name, value in (("measured", []), ("results", timed()), ("stopped_by", None)):
        monkeypatch.setattr(Timing, name, value)
    return SimpleNamespace(path=pretended_gpu / "heads-nvidia-h200-fake.jsonl", copies=copies)


ARGUMENTS = ("heads", "resnet18", "--batch", 8, "--batch", 1, "--classes", 10)


def test_heads_are_measured_shown_kept_and_not_measured_again(pretended):
    done = tune(*ARGUMENTS)
    assert done.exit_code == 0, done.output
    shapes = [("layer1", "layer2"), ("layer3",)]
    assert Timing.measured == [(batch, taps) for batch in (8, 1) for taps in shapes]
    assert len(pretended.copies) == 1, "the copy is timed once a run"
    lines = done.stdout.splitlines()
    assert lines[0].startswith("  0% resnet18 float16, batch 8, 10 classes") and lines[0].endswith(": building")
    shown = [line for line in lines if ": compiled" in line]
    assert len(shown) == 4 and shown[0].startswith(" 17% about ") and "batch 8, layer1, layer2: compiled" in shown[0]
    assert done.stdout.count("4.00 (3.98-4.02)") == 4 and "4.50 (4." in done.stdout
    assert "Records: autotune-records/heads-nvidia-h200-fake.jsonl" in done.stdout
    records = read_records(pretended.path)
    assert [record.variant for record in records] == ["fused", "eager", "compiled", "bytes"] * 4
    assert all(record.environment["clocks"] == {"sm_mhz": 1980.0} for record in records)
    kept = pretended.path.read_bytes()
    again = tune(*ARGUMENTS)
    assert again.exit_code == 0 and pretended.path.read_bytes() == kept and len(pretended.copies) == 1
    assert table_of(again) == table_of(done)
    one = tune("heads", "resnet18", "--batch", 1, "--classes", 10)
    assert one.stdout.count("4.00 (3.98-4.02)") == 2, "the table has what was asked for"


def table_of(result):
    return result.stdout[result.stdout.index("Heads of resnet18 alone") :]


def test_a_run_that_was_killed_goes_on(pretended):
    tune(*ARGUMENTS)
    whole = pretended.path.read_bytes().splitlines(keepends=True)
    pretended.path.write_bytes(b"".join(whole[:5]) + whole[5][:40])  # within a line of the second head
    Timing.measured.clear()
    again = tune(*ARGUMENTS)
    assert again.exit_code == 0 and table_of(again).count("4.00 (3.98-4.02)") == 4
    assert Timing.measured == [(8, ("layer3",)), (1, ("layer1", "layer2")), (1, ("layer3",))]
    assert len(read_records(pretended.path)) == 4 + 1 + 3 * 4


def test_failures_are_shown_and_kept(pretended, monkeypatch):
    failed = {**timed(), "compiled": Failure("RuntimeError", "no kernel")}
    monkeypatch.setattr(Timing, "results", failed)
    done = tune(*ARGUMENTS)
    assert done.exit_code == 0 and "failed: 1 RuntimeError" in done.stdout
    assert "layer1, layer2, batch 8, 10 classes: compiled: RuntimeError: no kernel" in done.stdout
    assert sum(record.error is not None for record in read_records(pretended.path)) == 4


def test_a_lost_device_is_one_line_and_the_same_command_goes_on(pretended, monkeypatch):
    monkeypatch.setattr(Timing, "stopped_by", DeviceLost("the CUDA context is lost (an illegal memory access)"))
    assert_one_line_error(tune(*ARGUMENTS), "illegal memory access); it is recorded: the same command goes on")
    assert [record.error is None for record in read_records(pretended.path)] == [False] * 3 + [True]
    monkeypatch.setattr(Timing, "stopped_by", None)
    assert tune(*ARGUMENTS).exit_code == 0 and Timing.measured[0] == (8, ("layer3",))


def test_the_table_command(tmp_path):
    path = written(tmp_path / "heads.jsonl", *a_head())
    printed = tune("table", path, "--markdown")
    assert printed.exit_code == 0, printed.output
    row = "| 10 | 8 | layer1 | 64x1x3136 | 3.50 (3.25-4.00) | 0.76 | 1,750.00 | 5.00 (4.90-5.10) | "
    assert (
        any(line.startswith(row) for line in printed.stdout.splitlines())
        and "| --- | --- | --- | --- | ---: |" in printed.stdout
    )
    drawn = tune("table", path)
    assert drawn.exit_code == 0 and "3.50 (3.25-4.00)" in drawn.stdout and "compiled\n" not in drawn.stdout
    (tmp_path / "empty.jsonl").touch()
    assert_one_line_error(
        tune("table", tmp_path / "empty.jsonl"),
        "empty.jsonl holds none of bench, heads, random-heads, overlap, footprint, pipeline, doctor, zoo or sweep",
    )
