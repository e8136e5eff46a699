"""Tables and reports as text of 80 columns, as a REPL shows them."""

import pytest
import torch
from auxhead.model import (
    EarlyExitNetwork,
    ExitLatencies,
    FusedAuxHead,
    calibrate_network,
    fuse_aux_heads,
    load_checkpoint,
    save_checkpoint,
)
from auxhead.model.basics.tables import text_table
from auxhead.model.export.exporting import ExportReport
from auxhead.model.training.training_loop import Epoch, Training
from torch import nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


def test_headings_of_several_lines_and_numbers_at_the_right():
    assert text_table([["exit", "right\nof all"], ["0: one", "9.1%"], ["1", "100.0%"]]).splitlines() == [
        "         right",
        "exit    of all",
        "------  ------",
        "0: one    9.1%",
        "1       100.0%",
    ]


def test_long_names_are_folded_in_80_columns():
    name = "0: features." + "deep." * 20
    lines = text_table([["exit", *["number"] * 6], [name, *["12.5%"] * 6]]).splitlines()
    assert max(map(len, lines)) <= 80 and lines[2].endswith(" 12.5%")
    assert "".join(line.split(" 12.5%")[0].strip() if "%" in line else line for line in lines[2:]).replace(" ", "") == (
        name.replace(" ", "")
    )


def backbone():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 3))


@pytest.mark.parametrize("timed", [False, True], ids=["", "with times"])
@pytest.mark.filterwarnings("ignore:The classifier is not shown to be better than chance")
def test_reports_are_readable(timed, tmp_path):
    network = EarlyExitNetwork(backbone(), {"0": FusedAuxHead(4, 3)}).eval()
    data = [(torch.randn(60, 3, 4, 4), torch.arange(60) % 3)]
    latencies = ExitLatencies((1.25, 3.5), 4, "eager", "some processor")
    budget = {"max_latency_ms": 3.0, "latencies": latencies} if timed else {"max_work": 0.5}
    report = calibrate_network(network, data, **budget)
    shown = repr(report)
    assert shown == str(report) == f"{report}" and max(map(len, shown.splitlines())) <= 80
    assert "\n0: 0 " in shown and "\n1: classifier the rest" in shown.replace("  ", " ") and "FLOPs" in shown
    assert ("answer\n" in shown) == timed

    save_checkpoint(tmp_path / "ck", network, classes=["a", "b", "c"], calibration=report.to_json())
    loaded = repr(load_checkpoint(tmp_path / "ck", backbone()))
    assert "0 [N, C, H, W]: pool 'avg', 3 classes\n3 classes: a, b, c\nCalibrated." in loaded
    assert repr(latencies).splitlines()[1:] == [
        "exit           answer in, ms",
        "-------------  -------------",
        "0                       1.25",
        "1: classifier            3.5",
    ]


def test_a_training_shows_the_best_of_many_epochs_and_the_last():
    epochs = tuple(Epoch(index, 1.0 / (1 + index), 1e-3, (0.5, 0.75)) for index in range(40))
    lines = repr(Training(epochs, 3)).splitlines()
    assert lines[0] == "Trained for 40 epochs, counted from 0; left as after epoch 3."
    assert [line.split() for line in lines[4:6]] == [
        ["3", "0.2500", "0.001", "50.0", "75.0"],
        ["20", "0.0476", "0.001", "50.0", "75.0"],
    ]
    assert len(lines) == 4 + 21


def test_other_reports(tmp_path):
    assert repr(ExportReport((tmp_path / "a.pt2",), None, "nothing")).splitlines() == [
        "Off from the network: not compared (nothing).",
        f"Saved: {tmp_path / 'a.pt2'}",
    ]
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)))
    assert repr(fuse_aux_heads(model)) == "1: pool 'avg', 3 classes"
    assert repr(fuse_aux_heads(nn.Sequential(nn.ReLU()))) == "No head was found."
