"""Tuning afresh: what is told apart, counted, kept and printed."""

import importlib
from contextlib import nullcontext

import pytest
import torch
from auxhead.autotune.measuring.targets import ALONE, NETWORK
from auxhead.autotune.records.record import read_records
from auxhead.autotune.retune.agreement import COLUMNS, agreement_tables
from auxhead.autotune.retune.measure import retune
from auxhead.autotune.sweep.search import alone_only
from auxhead.autotune.sweep.space import neighbours, text
from auxhead.autotune.sweep.strategies import STRATEGIES
from support.command_line import assert_one_line_error, assert_told_how_to_go_on, tune
from support.sweep_fakes import Synthetic, book_at, small_target

TARGET = small_target()
OTHERS = neighbours(TARGET.rule, TARGET.shape)[:3]


def books(count):
    return [book_at(None) for _ in range(count)]


def rows(agreements):
    (table,) = agreement_tables([one.record(book_at(None)) for one in agreements])
    return [dict(zip(COLUMNS, row, strict=True)) for row in table.rows], table.remarks


def test_retuning_converges():
    """Ten times afresh: the same configuration as most often, or one that a further measurement calls tied with it."""
    targets = [small_target(1, 64, 49), small_target(8, 32, 196)]
    agreed, wavered = 0, False
    for seed in (0, 1):  # of one run of 40 tunings four may differ by chance
        found = retune(Synthetic(seed, noise=2.0), targets, STRATEGIES["quick"], books(11))
        assert [(one.target, one.place) for one in found] == [
            (one, place) for one in targets for place in (ALONE, NETWORK)
        ]
        assert all(one.chosen.total() == one.tunings == 10 for one in found)
        of_head, (said,) = rows(found)
        agree = sum(int(row["the same"]) + int(row["tied with it"]) for row in of_head)
        assert said.endswith(f"{agree / 40:.1%} agree.")
        agreed += agree
        wavered |= any(len(one.chosen) > 1 for one in found)
    assert agreed >= 76 and wavered, "noise does change what is chosen"


def test_alone_only_ends_before_the_network():
    measurer = Synthetic()
    (found,) = retune(measurer, [TARGET], alone_only(STRATEGIES["quick"]), books(3))
    assert found.place == ALONE and {place for place, _, _ in measurer.timed} == {ALONE}
    one_configuration = small_target(samples=1, channels=1, columns=1, classes=1)
    (found,) = retune(measurer, [one_configuration], alone_only(STRATEGIES["full"]), books(3))
    assert list(found.chosen.values()) == [2]


class Fickle(Synthetic):
    """Each tuning finds another configuration to be by far the fastest; the comparison tells the truth."""

    def __init__(self, best, us):
        super().__init__(noise=0.1)
        self.best, self.us = list(best), us

    def _time(self, target, place, configs, rounds, captures):
        best = self.best.pop(0) if self.best else None
        found = super()._time(target, place, configs, rounds, captures)
        for config, paired in found.items():
            wanted = (1.0 if config == best else 2.0) if best else self.us[config]
            scale = wanted / paired.own[0][0]
            found[config] = paired._replace(own=[[us * scale for us in times] for times in paired.own])
        return found


def asks_for(*configs):
    def search(target):
        ask = importlib.import_module("auxhead.autotune.sweep.search").Ask
        yield ask(ALONE, (target.rule, *configs), 4, 1.0)

    return search


def test_what_differs_is_told_from_what_is_tied():
    first, second, third = OTHERS
    us = {TARGET.rule: 1.0, first: 1.0, second: 1.001, third: 1.1}
    measurer = Fickle([first, second, first, third, first], us)
    (found,) = retune(measurer, [TARGET], asks_for(*OTHERS), books(6))
    assert found.chosen == {first: 3, second: 1, third: 1} and found.tunings == 5
    ((row,), (said,)) = rows([found])
    assert row["head"] == str(TARGET.shape) and row["place"] == ALONE and row["chosen most often"] == text(first)
    assert [row[name] for name in ("tunings", "the same", "tied with it", "others")] == ["5", "3", "1", "1"]
    assert row["time / that of it"].startswith("1.0") and ", 1.1" in row["time / that of it"]
    assert said == (
        "Of 5 tunings of 1 heads 3 chose the same as most of that head, 1 what is tied with it, 1 neither: 80.0% agree."
    )


def test_what_comes_to_nothing_does_not_agree():
    measurer = Synthetic(fails=lambda config: ("check", "wrong answer", "off by 2"))
    (found,) = retune(measurer, [TARGET], asks_for(*OTHERS), books(3))
    ((row,), (said,)) = rows([found])
    assert not found.chosen and row["chosen most often"] == "-" and row["others"] == "2" and "0.0% agree" in said


def test_the_last_record_of_a_head_counts_and_kernels_are_kept_apart():
    (found,) = retune(Synthetic(), [TARGET], asks_for(), books(3))
    records = [found.record(book_at(None)), found._replace(tunings=4).record(book_at(None))]
    records.append(found.record(book_at(None, protocol={"kernel": "f" * 16})))
    first, second = agreement_tables(records)
    assert first.rows[0][3] == "4" and "Of 4 tunings of 1 heads" in first.remarks[0]
    assert "f" * 16 in second.title and "f" * 16 not in first.title


class Measurer(Synthetic):
    protocol = {"chain": 20}
    of_network = {"trunk": "feedfacecafebeef", "forks": []}
    made = 0

    def __init__(self, subject, ahead):
        assert ahead == "other processes"
        super().__init__(Measurer.made)
        Measurer.made += 1
        self.targets = [small_target(subject.batch, classes=subject.classes)]


@pytest.fixture
def pretended(pretended_gpu, monkeypatch):
    command = importlib.import_module("auxhead.autotune.retune.command")
    monkeypatch.setattr(command, "HeadTiming", Measurer)
    monkeypatch.setattr(command.CompileAhead, "beside", lambda device: nullcontext("other processes"))
    return pretended_gpu


def printed(result):
    """What is printed at the end."""
    return result.stdout.partition("Tuned afresh; ")[2]


def test_the_command(pretended):
    arguments = ("retune", "resnet18", "--batch", 8, "--classes", 10, "--times", 2)
    done = tune(*arguments)
    assert done.exit_code == 0, done.output
    assert "tuning 2 of 2: resnet18 float16, batch 8, layer1: 21 configurations alone" in done.stdout
    assert "Of 2 tunings of 1 heads " in done.stdout and "Records: autotune-records/retune-" in done.stdout
    names = {path.name.removeprefix("retune-nvidia-h200-fake") for path in pretended.iterdir()}
    assert {".jsonl", "-01.jsonl", "-02.jsonl"} <= names <= {".jsonl", "-01.jsonl", "-02.jsonl", "-compared.jsonl"}
    out = pretended / "retune-nvidia-h200-fake.jsonl"
    assert [one.kind for one in read_records(out)] == ["retune"]
    kept = {path: path.read_bytes() for path in pretended.iterdir()}
    again = tune(*arguments)
    assert printed(again) == printed(done) and "configurations alone" not in again.stdout
    assert kept == {path: path.read_bytes() for path in pretended.iterdir()}, "nothing is measured or kept twice"
    table = tune("table", out)
    assert (
        table.exit_code == 0
        and table.stdout.strip() == f"Tuned afresh; {printed(done)}".partition("Records")[0].strip()
    )
    assert "| head | place | chosen most often |" in tune("table", out, "--markdown").stdout
    assert "got no records of kind 'sweep'" in tune("promote", out).stderr


def test_an_interrupt_is_one_line(pretended, monkeypatch):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Measurer, "alone", interrupted)
    assert_told_how_to_go_on(tune("retune", "resnet18", "--classes", 10))


def test_bad_options(pretended, monkeypatch):
    refused = tune("retune", "resnet18", "--times", 1)
    assert refused.exit_code == 2 and "--times" in refused.output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_one_line_error(tune("retune", "resnet18"), "retune: torch sees no CUDA device here")
