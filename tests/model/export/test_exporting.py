"""``export_exits`` and ``export_stages``: files that answer as the network does, and what is refused."""

import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from auxhead.model import (
    EarlyExitNetwork,
    ExitRule,
    Extract,
    FusedAuxHead,
    ModuleHead,
    attach_exits,
    export_exits,
    export_stages,
)
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.export import file_formats
from auxhead.model.export.exporting import ExportReport, describe
from support.example_models import Skipping, SmallNet
from support.exported import first_sure, read_description, run_stages, run_whole
from support.multi_exit_models import InAList
from torch import Tensor, nn

FORMATS = [pytest.param("pt2", id="pt2"), pytest.param("onnx", id="onnx")]
BATCHES = (1, 2, 5)


@pytest.fixture(autouse=True)
def _with_onnx(request: pytest.FixtureRequest) -> None:
    if "onnx" in request.node.name:
        pytest.importorskip("onnx")
        pytest.importorskip("onnxscript")


RULES = {
    "block0": ExitRule(0.24, temperature=1.5),
    "block1": ExitRule(0.2, criterion="margin", temperature=0.5),
    "block2": ExitRule(0.1, criterion="entropy", enabled=False),
}
#: What never exits by default, and what counts heads.
MORE_RULES = {
    "block0": ExitRule(criterion="energy", temperature=2.0),
    "block1": ExitRule(criterion="patience"),
    "block2": ExitRule(2, criterion="patience"),
}


def small_network(backbone: nn.Module | None = None, **maxima: Any) -> EarlyExitNetwork:
    heads = {tap: FusedAuxHead(None, 5) for tap in SmallNet.taps}
    heads |= {tap: FusedAuxHead(None, 5, pool="max", pool_size=size) for tap, size in maxima.items()}
    heads["block0"] = FusedAuxHead(8, 5, hidden_features=9, activation="gelu", norm=True) if maxima else heads["block0"]
    backbone = SmallNet() if backbone is None else backbone
    return EarlyExitNetwork(backbone, heads, RULES, example_input=torch.randn(2, 3, 8, 8)).eval()


def assert_same_logits(found: list[Tensor], network: EarlyExitNetwork, x: Tensor) -> None:
    with torch.no_grad():
        wanted = network.logits(x)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def one_head() -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(), {"block0": FusedAuxHead(8, 5)}, 0.24).eval()


@pytest.fixture(scope="module")
def network() -> EarlyExitNetwork:
    """Of heads with hidden layers, and those that take maxima, of windows that overlap: block1 returns 4 x 4."""
    torch.manual_seed(0)
    return small_network(Skipping(), block1=(3, 2), block2=1)


@pytest.fixture(scope="module")
def exported(network: EarlyExitNetwork, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any, str], ExportReport]:
    """Exports that network, each way once, to a folder of its own."""

    @cache
    def export(by: Any, format: str) -> ExportReport:
        folder = tmp_path_factory.mktemp("exported")
        return by(network, torch.randn(2, 3, 8, 8), folder / f"net.{format}", format=format)

    return export


@pytest.mark.parametrize("format", FORMATS)
def test_one_file_has_the_logits_of_all_exits(format: str, network: EarlyExitNetwork, exported: Callable) -> None:
    report = exported(export_exits, format)
    folder = report.files[0].parent
    assert report.files == (folder / f"net.{format}", folder / f"net.{format}.json")
    assert set(folder.iterdir()) == set(report.files)
    assert report.difference is not None and report.difference < 1e-5
    assert report.checked_by in (["torch.export.load"] if format == "pt2" else ["onnxruntime", "onnx.reference"])
    for size in BATCHES:
        x = torch.randn(size, 3, 8, 8)
        assert_same_logits(run_whole(report.files[-1], x), network, x)


@pytest.mark.parametrize("format", FORMATS)
def test_stages_run_one_after_another_are_the_network(
    format: str, network: EarlyExitNetwork, exported: Callable
) -> None:
    report = exported(export_stages, format)
    folder = report.files[0].parent
    names = [*(f"stage_{index}.{format}" for index in range(4)), "stages.json"]
    assert report.files == tuple(folder / name for name in names)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for size in BATCHES:
        x = torch.randn(size, 3, 8, 8)
        assert_same_logits(run_stages(report.files[-1], x), network, x)


def test_the_json_is_enough_to_answer_as_the_network_does(network: EarlyExitNetwork, exported: Callable) -> None:
    whole, stages = (exported(by, "pt2").files[-1] for by in (export_exits, export_stages))
    description = read_description(whole)
    assert description["exits"][1] == {
        "logits": "exit_1",
        "tap": "block1",
        "rule": {"threshold": 0.2, "criterion": "margin", "temperature": 0.5, "enabled": True},
    }
    assert description["exits"][-1] == {"logits": "exit_3", "tap": None, "rule": None}
    assert description["files"][0]["inputs"] == [{"name": "input", "shape": ["batch", 3, 8, 8], "dtype": "float32"}]
    assert description["files"][0]["outputs"][0] == {"name": "exit_0", "shape": ["batch", 5], "dtype": "float32"}
    assert read_description(stages)["exits"] == description["exits"]
    x = 3 * torch.randn(64, 3, 8, 8)
    wanted = network(x)
    assert len(wanted.exit_index.unique()) > 2
    for said, logits in ((whole, run_whole(whole, x)), (stages, run_stages(stages, x))):
        label, exit_index = first_sure(said, logits)
        assert torch.equal(label, wanted.label) and torch.equal(exit_index, wanted.exit_index)


def test_rules_of_every_criterion_are_in_the_json() -> None:
    network = small_network()
    network.set_rules(MORE_RULES)
    exits = describe(network, [])["exits"]
    for one, head in zip(exits[:-1], network.exit_heads, strict=True):
        assert ExitRule(**one["rule"]).extra_repr() == head.rule.extra_repr()
    assert [one["rule"]["criterion"] for one in exits[:-1]] == ["energy", "patience", "patience"]


class Windows(nn.Module):
    """Tokens behind a class token, in two windows a sample: each stage needs sizes that depend on the batch."""

    def __init__(self, adds: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.window, self.last, self.fc = nn.Linear(16, 16), nn.Linear(48, 48), nn.Linear(16, 5)
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = torch.cat([self.token.expand(n, -1, -1), x], 1)
        windows = self.window(x.reshape(2 * n, 3, 16))
        y = self.layer(windows.reshape(n, 6, 16))
        last = self.last(windows.flatten(1)).reshape(n, 6, 16)
        return self.fc((last + y if self.adds else last)[:, 0])


def windows_network(adds: bool = True) -> EarlyExitNetwork:
    heads = {"layer": FusedAuxHead(None, 5, pool="first")}
    return EarlyExitNetwork(Windows(adds).eval(), heads, example_input=torch.randn(2, 5, 16))


def test_tokens_and_sizes_that_depend_on_the_batch(tmp_path: Path) -> None:
    network = windows_network()
    description = export_stages(network, torch.randn(2, 5, 16), tmp_path / "net").files[-1]
    shapes = [value["shape"] for value in read_description(description)["files"][1]["inputs"]]
    assert shapes == [["2*batch", 3, 16], ["batch", 6, 16]]
    for size in BATCHES:
        x = torch.randn(size, 5, 16)
        assert_same_logits(run_stages(description, x), network, x)


@pytest.mark.parametrize("kind", ["own", "mixed"])
def test_module_heads_parts_of_outputs_and_exits_of_ones_own(kind: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16, 16)
    if kind == "own":
        network, export = attach_exits(InAList().eval(), x), export_exits
    else:
        layers = nn.Conv2d(8, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
        heads = {
            "block0": ModuleHead(nn.Sequential(*layers).eval()), "block1": FusedAuxHead(None, 5, pool="none"),
        }  # fmt: skip
        extract = {"block1": Extract(layout="NHWC")}
        network = EarlyExitNetwork(SmallNet().eval(), heads, example_input=x, extract=extract)
        export = export_stages
    description = export(network, x, tmp_path / ("net.pt2" if kind == "own" else "net")).files[-1]
    run = run_whole if kind == "own" else run_stages
    assert_same_logits(run(description, x), network, x)


def test_stages_of_torchvision_hand_over_what_the_next_one_needs(tmp_path: Path) -> None:
    """Of a tap within a block the shortcut, too."""
    backbone = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)
    x = torch.randn(2, 3, 32, 32)
    network = EarlyExitNetwork(backbone.eval(), {"layer2.0.conv1": FusedAuxHead(None, 5)}, example_input=x)
    description = export_stages(network, x, tmp_path / "net").files[-1]
    assert [len(file["inputs"]) for file in read_description(description)["files"]] == [1, 2]
    x = torch.randn(3, 3, 32, 32)
    assert_same_logits(run_stages(description, x), network, x)


@pytest.mark.filterwarnings("error")
def test_channels_last_weights_in_float64_without_a_warning(tmp_path: Path) -> None:
    network = one_head().double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).double()
    description = export_stages(network, x, tmp_path / "net").files[-1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as whoever loads it may
        assert_same_logits(run_stages(description, x), network, x)


class Counts(SmallNet):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Branches(SmallNet):
    """Runs otherwise for some values, which no graph can."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.block0(x)
        if x.sum() > 0:
            x = x + 1
        x = self.block2(self.block1(x))
        return self.fc(x.mean((2, 3)))


class Measures(SmallNet):
    """Asks by ``len`` for the number of samples, which is a plain number in a graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(len(x), -1)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: small_network(Counts()), "network: a forward writes to 'backbone.calls', wants none that does"),
        (lambda: small_network(Branches()), "network: torch.export cannot export it: .*data-dependent"),
        (
            lambda: small_network(Measures()),
            "network: torch.export cannot export it: .* specialized it to be",
        ),
        (lambda: small_network().train(), "network: in training mode, wants network.eval"),
        (
            lambda: EarlyExitNetwork(SmallNet().eval(), {"block0": FusedAuxHead(None, 5)}),
            r"heads\['block0'\]: does not know its width yet",
        ),
    ],
    ids=["state", "values", "size", "training", "lazy"],
)
def test_networks_that_cannot_be_exported(network, message, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export_stages(network(), torch.randn(2, 3, 8, 8), tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_a_stage_that_could_not_tell_the_batch_size(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="network: a stage needs the size .*, which nothing that is handed to it has"):
        export_stages(windows_network(adds=False), torch.randn(2, 5, 16), tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_a_file_that_onnx_refuses(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(BadInput, match="network: onnx.checker refuses its file: .*bfloat16"):  # in a convolution
        export_exits(one_head().bfloat16(), torch.randn(2, 3, 8, 8).bfloat16(), tmp_path / "net", format="onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("export", [export_exits, export_stages], ids=lambda one: one.__name__)
def test_arguments_that_are_wrong(export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = small_network(), torch.randn(2, 3, 8, 8)
    with pytest.raises(TypeError, match="network: got SmallNet, wants an EarlyExitNetwork"):
        export(SmallNet(), x, tmp_path / "net")
    with pytest.raises(TypeError, match="example_images: got list, wants a torch.Tensor"):
        export(network, [x], tmp_path / "net")
    with pytest.raises(BadInput, match=r"format: got 'tflite', wants one of \['onnx', 'pt2'\]"):
        export(network, x, tmp_path / "net", format="tflite")
    with pytest.raises(BadInput, match=": .*nowhere is no folder, wants one that is there"):
        export(network, x, tmp_path / "nowhere" / "net")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(BadInput, match="format: 'onnx' needs onnx and onnxscript .*wants `pip install"):
        export(network, x, tmp_path / "net", format="onnx")
    assert not list(tmp_path.iterdir())
    (tmp_path / "net").write_text("of before")
    with pytest.raises(BadInput, match=": .*net is there already, wants the name of something new"):
        export(network, x, tmp_path / "net")
    assert (tmp_path / "net").read_text() == "of before"
    (tmp_path / "net").rename(tmp_path / "net.json")
    if export is export_exits:
        with pytest.raises(BadInput, match="path: .*net.json is there already"):
            export(network, x, tmp_path / "net")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of before"]


def test_files_that_compute_something_else_are_not_kept(tmp_path: Path, monkeypatch) -> None:
    real = file_formats.open_file

    def wrong(path: Path, format: str):
        file = real(path, format)
        return file._replace(run=lambda values: [1.1 * value for value in file.run(values)])

    monkeypatch.setattr(file_formats, "open_file", wrong)
    with pytest.raises(RuntimeError, match="file: logits that torch.export.load computes of a batch of 1 differ from"):
        export_exits(one_head(), torch.randn(2, 3, 8, 8), tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_what_onnx_cannot_run_here_is_said(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    backbone = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)).bfloat16().eval()  # numpy has no bfloat16
    x = torch.randn(2, 4).bfloat16()
    network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(None, 5)}, example_input=x)
    report = export_exits(network, x, tmp_path / "net.onnx", format="onnx")
    assert report.difference is None and "onnx.checker alone, since onnx.reference cannot run it" in report.checked_by
