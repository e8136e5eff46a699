"""Exits by class: exact numbers of a small log, the classes that a table of many shows, and names in a command."""

import io

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, calibrate_network
from auxhead.model.calibration.report import CalibratedClass, exits_by_class, most_telling
from auxhead.model.commands.calibrate_run import print_report
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn


def test_rows_are_those_of_the_log():
    labels = torch.tensor([0, 2, 0, 0, 2, 0])
    exits = torch.tensor([0, 1, 2, 0, 2, 2])
    correct = torch.tensor([[1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 0, 1]]) > 0
    assert exits_by_class(labels, exits, correct, 4) == [
        CalibratedClass("0", 4, accuracy=0.75, full_accuracy=0.75, shares=[0.5, 0.0, 0.5], mean_exit=1.0),
        CalibratedClass("1", 0, None, None, None, None),
        CalibratedClass("2", 2, accuracy=0.5, full_accuracy=0.5, shares=[0.0, 0.5, 0.5], mean_exit=1.5),
        CalibratedClass("3", 0, None, None, None, None),
    ]


@given(seed=st.integers(0, 1000), samples=st.integers(1, 60), classes=st.integers(1, 8), heads=st.integers(1, 3))
def test_classes_add_up_to_the_whole(seed, samples, classes, heads):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    exits = torch.randint(heads + 1, (samples,), generator=generator)
    correct = torch.rand(heads + 1, samples, generator=generator) < 0.7
    rows = exits_by_class(labels, exits, correct, classes)
    assert [row.samples for row in rows] == torch.bincount(labels, minlength=classes).tolist()

    def weighted(value):
        return sum(row.samples * value(row) for row in rows if row.samples) / samples

    assert weighted(lambda row: row.accuracy) == pytest.approx(
        sum(bool(correct[exit_index, sample]) for sample, exit_index in enumerate(exits.tolist())) / samples
    )
    assert weighted(lambda row: row.full_accuracy) == pytest.approx(correct[-1].double().mean().item())
    assert weighted(lambda row: row.mean_exit) == pytest.approx(exits.double().mean().item())
    for index in range(heads + 1):
        share = (exits == index).double().mean().item()
        assert weighted(lambda row, index=index: row.shares[index]) == pytest.approx(share)


def test_the_most_telling_are_those_that_are_wrong_or_late():
    def row(name, accuracy, mean_exit):
        return CalibratedClass(name, 1, accuracy, accuracy, [1.0, 0.0], mean_exit)

    rows = [
        row("good", 1.0, 0.1), CalibratedClass("absent", 0, None, None, None, None), row("wrong", 0.2, 0.1),
        row("late", 0.9, 0.8), row("middling", 0.8, 0.5), row("later", 1.0, 0.9), row("wrong and late", 0.1, 1.0),
    ]  # fmt: skip
    assert [one.name for one in most_telling(rows, 1)] == ["wrong and late"]
    assert [one.name for one in most_telling(rows, 2)] == ["wrong", "later", "wrong and late"]
    assert most_telling(rows, 9) == [row for row in rows if row.samples]


def printed(classes):
    """What is printed of a network of so many classes, and its report."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, classes))
    network = EarlyExitNetwork(backbone, {"0": FusedAuxHead(4, classes)}).eval()
    data = [(torch.randn(20 * classes, 3, 4, 4), torch.arange(20 * classes) % classes)]
    report = calibrate_network(network, data, max_work=0.5)
    text = io.StringIO()
    print_report(Console(file=text, width=200), report)
    return text.getvalue(), report


def by_class(text):
    """The lines of the second table, a class each."""
    return [line for line in text[text.index("Test split by class") :].splitlines() if line.startswith("│")]


def test_all_of_a_few_classes_are_printed():
    text, report = printed(3)
    assert len(report.classes) == 3 and sum(row.samples for row in report.classes) == report.samples["test"]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in by_class(text)]
    assert rows == [
        [row.name, f"{row.samples}", *(f"{value:.1%}" for value in (row.accuracy, row.full_accuracy, *row.shares))]
        for row in report.classes
    ]


def test_of_many_classes_the_report_has_all_and_the_table_says_which_it_shows():
    text, report = printed(21)
    assert len(report.to_json()["classes"]) == 21
    assert "of 21 the 10 that are right least often, and the 10 that leave latest" in " ".join(text.split())
    shown = [line.split("│")[1].strip() for line in by_class(text)]
    assert shown == [row.name for row in most_telling(report.classes, 10)] and len(shown) <= 20
