"""``export_decision``: files that answer as the network does and run no further, and what is refused."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitRule, Extract, FusedAuxHead, ModuleHead, export_decision
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.export import decision
from auxhead.model.export.exporting import ExportReport
from support.decided import assert_answers, leave_everywhere, opened
from support.example_models import Skipping, SmallNet
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")

FORMATS = [pytest.param("pt2", id="pt2"), pytest.param("onnx", id="onnx")]
#: How Inductor compiles without the optimizations that take its time, for what runs once.
CHEAPLY = {
    "cpp.vec_isa_ok": False,
    "cpp_cache_precompile_headers": False,
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}


@pytest.fixture(autouse=True)
def _with_onnx(request: pytest.FixtureRequest) -> None:
    if "onnx" in request.node.name:
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def network() -> EarlyExitNetwork:
    """Of a head with a hidden layer and a norm, and one that takes maxima, by two criteria."""
    torch.manual_seed(0)
    heads = {
        "block0": FusedAuxHead(8, 5, hidden_features=9, activation="gelu", norm=True),
        "block1": FusedAuxHead(None, 5, pool="max", pool_size=(3, 2)),
    }
    rules = {
        "block0": ExitRule(criterion="energy", temperature=0.5),
        "block1": ExitRule(criterion="margin", temperature=0.7),
    }
    network = EarlyExitNetwork(Skipping(), heads, rules, example_input=torch.randn(2, 3, 8, 8)).eval()
    leave_everywhere(network, samples())
    return network


@pytest.fixture(scope="module")
def exported(network: EarlyExitNetwork, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ExportReport]:
    """Exports that network in each format once."""

    @cache
    def export(format: str) -> ExportReport:
        folder = tmp_path_factory.mktemp("decided")
        return export_decision(network, torch.randn(1, 3, 8, 8), folder / f"net.{format}", classes=list("abcde"))

    return export


def samples(count: int = 48) -> Tensor:
    return 3 * torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_answers_as_the_network_at_every_exit(format: str, network: EarlyExitNetwork, exported) -> None:
    report = exported(format)
    folder = report.files[0].parent
    assert report.files == (folder / f"net.{format}", folder / f"net.{format}.json")
    assert {*folder.iterdir()} == {*report.files}
    assert report.difference is not None and report.difference < 1e-5
    assert assert_answers(opened(report.files[0]), network, samples()) == {0, 1, 2}


@pytest.mark.parametrize("format", FORMATS)
def test_rules_of_a_file_are_changed_as_those_of_the_network(format: str, network: EarlyExitNetwork, exported) -> None:
    run = opened(exported(format).files[0])
    own = [head.rule for head in network.exit_heads]
    before = [(rule.threshold, rule.temperature, rule.enabled) for rule in own]
    try:
        for rule, temperature, enabled in zip(own, (0.3, 2.0), (False, True), strict=True):
            rule.temperature, rule.enabled = temperature, enabled
        leave_everywhere(network, samples())
        rules = {
            "thresholds": torch.tensor([rule.threshold for rule in own]),
            "temperatures": torch.tensor([rule.temperature for rule in own]),
            "enabled": torch.tensor([int(rule.enabled) for rule in own]),
        }
        assert assert_answers(run, network, samples(), **rules) == {1, 2}
    finally:
        for rule, values in zip(own, before, strict=True):
            rule.threshold, rule.temperature, rule.enabled = values


def test_the_json_of_a_file(network: EarlyExitNetwork, exported: Callable[[str], ExportReport]) -> None:
    threshold = network.exit_heads[1].rule.threshold
    told = json.loads(exported("pt2").files[-1].read_text())
    assert told["classes"] == list("abcde") and told["preprocessing"] is None
    assert told["exits"][1] == {
        "tap": "block1",
        "rule": {"threshold": threshold, "criterion": "margin", "temperature": 0.7, "enabled": True},
    }
    assert told["exits"][2] == {"tap": None, "rule": None}
    (file,) = told["files"]
    assert file["inputs"] == [{"name": "input", "shape": [1, 3, 8, 8], "dtype": "float32"}]
    assert [value["name"] for value in file["outputs"]] == ["label", "confidence", "probs", "exit_index"]


@pytest.mark.parametrize("format", FORMATS)
def test_the_report_says_what_is_not_skipped_in_80_columns(format: str, exported) -> None:
    *lines, saved = str(exported(format)).splitlines()
    assert max(map(len, lines)) <= 80 and saved.startswith("Saved: ")
    said = " ".join(lines)
    assert "leaving at each of 3 exits (" in said and "their parameters are loaded" in said
    assert ("evaluates each If on the host" if format == "onnx" else "the host waits for each exit") in said


def test_layers_behind_the_exit_that_answers_do_not_run_in_pt2(exported: Callable[[str], ExportReport]) -> None:
    run = opened(exported("pt2").files[0])
    for leaves_at in range(3):
        enabled = (torch.arange(2) == leaves_at).long()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            assert int(run(samples(1), thresholds=torch.full((2,), -100.0), enabled=enabled)[-1]) == leaves_at
        ran = [event.count for event in profile.key_averages() if event.key == "aten::conv2d"]
        assert ran == [leaves_at + 1]


def test_layers_behind_the_exit_that_answers_do_not_run_in_onnx(exported, tmp_path: Path, monkeypatch) -> None:
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    for leaves_at in range(3):
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.enable_profiling = 3, True
        session = onnxruntime.InferenceSession(exported("onnx").files[0], options)
        enabled = (torch.arange(2) == leaves_at).long().numpy()
        given = {"input": samples(1).numpy(), "thresholds": torch.full((2,), -100.0).numpy(), "enabled": enabled}
        assert int(session.run(["exit_index"], given)[0]) == leaves_at
        events = json.loads(Path(session.end_profiling()).read_text())
        ran = [each for each in events if each.get("args", {}).get("op_name") in ("Conv", "FusedConv")]
        assert len([each for each in ran if each["name"].endswith("_kernel_time")]) == leaves_at + 1


def test_module_heads_parts_of_outputs_and_answers_without_probabilities(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 16, 16)
    layers = nn.Conv2d(8, 4, 3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    heads = {
        "block0": ModuleHead(nn.Sequential(*layers).eval()),
        "block1": FusedAuxHead(None, 5, pool="none", return_probs=False),
    }
    extract = {"block1": Extract(layout="NHWC")}
    network = EarlyExitNetwork(SmallNet().eval(), heads, 0.25, example_input=x, extract=extract).double().eval()
    report = export_decision(network, x.double(), tmp_path / "net")
    assert [value["name"] for value in json.loads(report.files[-1].read_text())["files"][0]["outputs"]] == [
        "label", "confidence", "exit_index",
    ]  # fmt: skip
    assert_answers(opened(report.files[0]), network, torch.randn(8, 3, 16, 16).double())


class TakesProbs(nn.Module):
    """Two inputs, one of them by the name of an output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fc = nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, probs: Tensor) -> Tensor:
        return self.fc(self.layer(x) * probs)


def test_inputs_do_not_take_the_names_of_outputs(tmp_path: Path) -> None:
    x = {"x": torch.randn(1, 4), "probs": torch.randn(1, 6)}
    network = EarlyExitNetwork(TakesProbs(), {"layer": FusedAuxHead(6, 5)}, example_input=x).eval()
    description = export_decision(network, x, tmp_path / "net.pt2").files[-1]
    inputs = json.loads(description.read_text())["files"][0]["inputs"]
    assert [value["name"] for value in inputs] == ["input_0", "input_1"]


class Elementwise(nn.Module):
    """No layer of it says how many classes there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * 2.0) * 1.5


class Chunked(nn.Module):
    """A stage hands over two views of one tensor, and takes inputs by names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fc = nn.Linear(4, 4), nn.Linear(8, 5)

    def forward(self, add: Tensor, linear: Tensor) -> Tensor:
        one, other = (add + linear).chunk(2, 1)
        return self.fc(torch.cat([self.layer(one) + other, one], 1))


@pytest.mark.parametrize("format", FORMATS)
def test_sizes_are_known_behind_exits(format: str, tmp_path: Path) -> None:
    """Entropy's largest is of the number of classes; of an example that is sure it is 0 whatever that is."""
    heads = {tap: ModuleHead(nn.Hardtanh(-1e6, 1e6)) for tap in ("first", "second")}
    sure = torch.eye(6)[:1] * 200.0
    network = EarlyExitNetwork(Elementwise(), heads, ExitRule(0.5, criterion="entropy"), example_input=sure).eval()
    file = export_decision(network, sure, tmp_path / f"net.{format}").files[0]
    torch.manual_seed(0)
    assert len(assert_answers(opened(file), network, 2 * torch.randn(20, 6))) > 1


@pytest.mark.parametrize("format", FORMATS)
def test_views_are_handed_over_and_inputs_keep_their_names(format: str, tmp_path: Path) -> None:
    x = {"add": torch.randn(1, 8), "linear": torch.randn(1, 8)}
    network = EarlyExitNetwork(Chunked(), {"layer": FusedAuxHead(4, 5)}, 0.3, example_input=x).eval()
    description = export_decision(network, x, tmp_path / f"net.{format}").files[-1]
    inputs = json.loads(description.read_text())["files"][0]["inputs"]
    assert [value["name"] for value in inputs][:2] == ["add", "linear"]


def test_what_somebody_has_written_meanwhile_stays(network: EarlyExitNetwork, tmp_path: Path, monkeypatch) -> None:
    compare = decision._compare

    def others(*given: object) -> object:
        (tmp_path / "net.pt2").write_text("of somebody else")
        return compare(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(decision, "_compare", others)
    with pytest.raises(BadInput, match="path: .*net.pt2 is there already"):
        export_decision(network, torch.randn(1, 3, 8, 8), tmp_path / "net.pt2")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of somebody else"]


def test_aot_inductor_compiles_it(tmp_path: Path) -> None:
    """As the page says: its layout optimization reads convolutions in a branch wrong."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Conv2d(20, 20, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    network = EarlyExitNetwork(nn.Sequential(*layers, nn.Linear(20, 5)), {"1": FusedAuxHead(20, 5)}).eval()
    leave_everywhere(network, samples())
    file = export_decision(network, torch.randn(1, 3, 8, 8), tmp_path / "net.pt2").files[0]
    path = torch._inductor.aoti_compile_and_package(
        torch.export.load(file),
        package_path=str(tmp_path / "compiled.pt2"),
        inductor_configs={**CHEAPLY, "layout_optimization": False},
    )
    assert assert_answers(torch._inductor.aoti_load_package(path), network, samples()) == {0, 1}


class DependsOnValues(nn.Module):
    """A head that no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + 1 if x.sum() > 0 else x)


class Bessel(nn.Module):
    """A head that ONNX has no operator for."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.special.bessel_j0(x))


@pytest.mark.parametrize(
    ("head", "format"), [(DependsOnValues, "pt2"), (Bessel, "onnx")], ids=["values-pt2", "operator-onnx"]
)
def test_a_head_that_cannot_be_exported_is_named_by_its_tap(head: type[nn.Module], format: str, tmp_path: Path) -> None:
    backbone = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 5)).eval()
    heads = {"1": FusedAuxHead(6, 5), "3": ModuleHead(head().eval())}
    network = EarlyExitNetwork(backbone, heads, example_input=torch.randn(1, 4))
    with pytest.raises(BadInput, match=r"heads\['3'\]: its ModuleHead cannot be exported: "):
        export_decision(network, torch.randn(1, 4), tmp_path / f"net.{format}")
    assert not list(tmp_path.iterdir())


def test_arguments_that_are_wrong(network: EarlyExitNetwork, tmp_path: Path) -> None:
    one = torch.randn(1, 3, 8, 8)
    with pytest.raises(BadInput, match="example: got a batch of 2, wants one sample, .*write export_stages"):
        export_decision(network, torch.randn(2, 3, 8, 8), tmp_path / "net")
    with pytest.raises(TypeError, match="example: got list, wants a torch.Tensor"):
        export_decision(network, [one], tmp_path / "net")
    with pytest.raises(TypeError, match="classes: got 'abcde', wants a list of names"):
        export_decision(network, one, tmp_path / "net", classes="abcde")
    with pytest.raises(BadInput, match="path: got '.', wants the name of a file"):
        export_decision(network, one, "")
    with pytest.raises(BadInput, match="example: got torch.float64, wants torch.float32, as the network has"):
        export_decision(network, one.double(), tmp_path / "net")
    with pytest.raises(BadInput, match="example: the network's logits for it are not all finite"):
        export_decision(network, one * torch.nan, tmp_path / "net")
    with pytest.raises(ValueError, match="classes: got 2 names, wants 5, as the network has classes, or none"):
        export_decision(network, one, tmp_path / "net", classes=["a", "b"])
    assert not list(tmp_path.iterdir())
    (tmp_path / "net.pt2.json").write_text("of before")
    with pytest.raises(BadInput, match="path: .*net.pt2.json is there already, wants the name of something new"):
        export_decision(network, one, tmp_path / "net.pt2")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of before"]


@pytest.mark.parametrize("wrong", ["exit", "confidence"])
def test_files_that_answer_otherwise_are_not_kept(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = decision.open_program

    class Wrong(nn.Module):
        def __init__(self, path: Path) -> None:
            super().__init__()
            self.module = real(path)

        def get_buffer(self, name: str) -> Tensor:
            return self.module.get_buffer(name)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            label, confidence, probs, exit_index = self.module(x)
            return label, confidence + 0.1 * (wrong == "confidence"), probs, exit_index + (wrong == "exit")

    monkeypatch.setattr(decision, "open_program", Wrong)
    backbone = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
    network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(6, 5)}, 0.2).eval()
    with pytest.raises(RuntimeError, match="file: torch.export.load answers a sample that is under its rules by exit"):
        export_decision(network, torch.randn(1, 4), tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_a_confidence_that_is_the_threshold_but_for_rounding_is_no_other_answer(tmp_path: Path, monkeypatch) -> None:
    real = decision.open_program

    def just_below(path: Path) -> nn.Module:
        module = real(path)
        module.thresholds -= 1e-6
        return module

    monkeypatch.setattr(decision, "open_program", just_below)
    backbone, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)), torch.randn(1, 4)
    network = EarlyExitNetwork(backbone, {"1": FusedAuxHead(6, 5)}, 0.0).eval()
    network.exit_heads[0].rule.threshold = float(network(x).confidence)
    assert int(network(x).exit_index) == 1  # strictly greater is sure
    assert export_decision(network, x, tmp_path / "net").difference is not None
