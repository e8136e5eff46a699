"""Exits by class: exact numbers of a small log, the classes that a table of many shows, and names in a command."""

import io

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, calibrate_network
from auxhead.model.calibration.report import CalibratedClass, exits_by_class, most_telling
from auxhead.model.commands.calibrate_run import print_report
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


@pytest.mark.parametrize("classes", [3, 21])
def test_all_of_a_few_classes_are_printed_and_of_many_the_most_telling(classes):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, classes))
    network = EarlyExitNetwork(backbone, {"0": FusedAuxHead(4, classes)}).eval()
    data = [(torch.randn(20 * classes, 3, 4, 4), torch.arange(20 * classes) % classes)]
    report = calibrate_network(network, data, max_work=0.5)
    out = io.StringIO()
    print_report(Console(file=out, width=200), report)
    text = out.getvalue()
    lines = [line for line in text[text.index("Test split by class") :].splitlines() if line.startswith("│")]
    shown = report.classes if classes == 3 else most_telling(report.classes, 10)
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines] == [
        [row.name, f"{row.samples}", *(f"{value:.1%}" for value in (row.accuracy, row.full_accuracy, *row.shares))]
        for row in shown
    ]
    assert len(report.to_json()["classes"]) == classes and len(shown) <= 20
    assert sum(row.samples for row in report.classes) == report.samples["test"]
    said = "of 21 the 10 that are right least often, and the 10 that leave latest" in " ".join(text.split())
    assert said == (classes == 21)
