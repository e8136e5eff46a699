"""What a plan is good for: whatever may change which runner is fastest is part of its key."""

import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from auxhead.model import EarlyExitNetwork
from auxhead.model.auto.plan_key import exits_of, plan_key, shares_of
from support.example_models import SmallNet, plain_heads
from support.planner_fakes import images, small_network
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")
module = importlib.import_module("auxhead.model.auto.plan_key")
EXITS = torch.tensor([[0, 3], [1, 3], [3, 3], [2, 0]])


def key(network: EarlyExitNetwork | None = None, x: Tensor | None = None, **other: object) -> dict[str, object] | None:
    torch.manual_seed(0)
    x = images(8) if x is None else x
    options = {"smaller": (1,), "trunk": "cudnn", "exits": EXITS, **other}
    return plan_key(network or small_network(), list(x.split(2)), **options)


def changed_parts(**other: object) -> set[str]:
    before, after = key(), key(**other)
    assert before is not None and after is not None
    return {name for name in before if before[name] != after[name]}


def test_it_is_the_same_for_what_is_the_same_but_for_values() -> None:
    """Another network of that structure, in JSON and back."""
    assert key() == key(small_network(seed=1)) and json.loads(json.dumps(key())) == key()
    network = small_network()
    network(images(3))
    network.heads[0].rule.threshold = 0.2
    network.heads[0].rule.threshold = 0.6
    assert key() == key(network)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("torch.__version__", "3.0", "software"),
        ("torch.version.cuda", "14.0", "software"),
        ("torch.backends.cudnn.version", lambda: 99999, "software"),
        ("auxhead.model.auto.plan_key.version", lambda package: "9.9", "software"),
        ("auxhead.model.auto.plan_key.driver_version", lambda: "600.1", "device"),
        ("auxhead.model.auto.plan_key.processor_name", lambda: "a Z80", "device"),
    ],
)
def test_device_and_software(monkeypatch: pytest.MonkeyPatch, name: str, value: object, part: str) -> None:
    before = key()
    monkeypatch.setattr(name, value)
    after = key()
    assert {each for each in before if before[each] != after[each]} == {part}


@pytest.mark.parametrize("other", [("NVIDIA H100", 132), ("NVIDIA H200", 66)], ids=str)
def test_another_gpu_or_a_part_of_one(monkeypatch: pytest.MonkeyPatch, other: tuple[str, int]) -> None:
    found = []
    for name, count in (("NVIDIA H200", 132), other):
        properties = types.SimpleNamespace(name=name, multi_processor_count=count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device, properties=properties: properties)
        found.append(module._device(torch.device("cuda", 0)))
    assert found[0] != found[1] and found[0]["sm_count"] == 132 and found[0]["gpu"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn.conv, "fp32_precision", "ieee"),
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings(owner: object, name: str, value: object) -> None:
    before, was = key(), getattr(owner, name)
    assert was != value
    try:
        setattr(owner, name, value)
        after = key()
    finally:
        setattr(owner, name, was)
    assert {each for each in before if before[each] != after[each]} == {"settings"}
    assert key() == before


@pytest.mark.parametrize("file", ["kernels/exit_kernel.py", "kernels/tuned/nvidia-h200.json", "model/polled_runner.py"])
def test_code_and_tuned_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str) -> None:
    monkeypatch.setattr(module.kernels, "__file__", str(tmp_path / "kernels" / "__init__.py"))
    monkeypatch.setattr(module, "__file__", str(tmp_path / "model" / "plan_key.py"))
    for name in ("kernels/a.py", "model/b.py", "kernels/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = key()["code"]
    (tmp_path / "kernels" / "notes.txt").write_text("nothing that runs")
    assert key()["code"] == before
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("1")
    written = key()["code"]
    (tmp_path / file).write_text("2")
    assert len({before, written, key()["code"]}) == 3


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ({"smaller": ()}, {"smaller"}),
        ({"trunk": "as_is"}, {"trunk"}),
        ({"x": images(8)[:, :, :4]}, {"sample"}),
        ({"x": images(8).half()}, {"sample"}),
        ({"x": images(8).to(memory_format=torch.channels_last)}, {"sample"}),
        ({"exits": torch.tensor([[0, 3], [1, 3], [3, 3], [2, 3]])}, {"exits"}),
        ({"exits": torch.tensor([[0, 0], [1, 3], [3, 3], [2, 3]])}, {"exits"}),
    ],
)
def test_what_is_run(other: dict[str, object], parts: set[str]) -> None:
    assert changed_parts(**other) == parts


def test_the_batch_size() -> None:
    before = key()
    after = plan_key(small_network(), list(images(8).split(4)), (1,), "cudnn", EXITS)
    assert {name for name in before if before[name] != after[name]} == {"batch"}


@pytest.mark.parametrize(
    ("name", "value"), [("threshold", 0.61), ("temperature", 1.5), ("criterion", "margin"), ("enabled", False)]
)
def test_rules(name: str, value: object) -> None:
    network = small_network()
    setattr(network.heads[1].rule, name, value)
    assert changed_parts(network=network) == {"rules"}


def test_shares_are_told_apart_in_steps() -> None:
    """Five samples in a hundred, and the batches that they hold up."""
    few, some, many = (torch.tensor([0] * (100 - count) + [3] * count).view(1, 100) for count in (40, 41, 46))
    assert changed_parts(exits=few) == {"exits"}
    assert key(exits=few) == key(exits=some) != key(exits=many)
    assert key(exits=few.view(50, 2)) != key(exits=few.view(2, 50).T), "the same samples, and fewer batches that stop"


def test_where_samples_leave() -> None:
    network, x = small_network(), images(12)
    exits = exits_of(network, x.split(4))
    assert torch.equal(exits.flatten(), network(x).exit_index) and exits.shape == (3, 4)
    assert shares_of(EXITS, 3) == (0.25, 0.125, 0.125, 0.5) and shares_of(torch.zeros(2, 2).long(), 3) == (1, 0, 0, 0)


def with_heads(backbone: nn.Module, **head: object) -> EarlyExitNetwork:
    network = EarlyExitNetwork(backbone, plain_heads(), 0.6, example_input=images(2)).eval()
    for each in network.heads:
        for name, value in head.items():
            setattr(each, name, value)
    return network


class Wider(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.block1 = self._block(8, 12, 1)


class Otherwise(SmallNet):
    pass


def larger_stride() -> EarlyExitNetwork:
    """Parameters of the same shapes."""
    return with_heads(Wider())


def other_class() -> EarlyExitNetwork:
    return with_heads(Otherwise())


def fewer_taps() -> EarlyExitNetwork:
    heads = {tap: head for tap, head in plain_heads().items() if tap != "block1"}
    return EarlyExitNetwork(SmallNet(), heads, 0.6, example_input=images(2)).eval()


def more_classes() -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(7), plain_heads(7), 0.6, example_input=images(2)).eval()


def in_bfloat16() -> EarlyExitNetwork:
    return small_network().bfloat16()


def channels_last() -> EarlyExitNetwork:
    return small_network().to(memory_format=torch.channels_last)


def without_probs() -> EarlyExitNetwork:
    return with_heads(SmallNet(), return_probs=False)


def with_an_attribute() -> EarlyExitNetwork:
    network = small_network()
    network.backbone.scale = 2.0
    return network


def with_a_hook() -> EarlyExitNetwork:
    network = small_network()
    network.backbone.block1.register_forward_hook(print)
    return network


def with_another_activation() -> EarlyExitNetwork:
    network = small_network()
    network.backbone.block1[2] = nn.ReLU6(inplace=True)
    return network


@pytest.mark.parametrize(
    "make",
    [
        larger_stride, other_class, fewer_taps, more_classes, in_bfloat16, channels_last, without_probs,
        with_an_attribute, with_a_hook, with_another_activation,
    ],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_another_network(make: Callable[[], EarlyExitNetwork]) -> None:
    assert {"network"} <= changed_parts(network=make()) <= {"network", "rules"}


SOURCE = """
from support.example_models import SmallNet

class Own(SmallNet):
    def forward(self, x):
        return super().forward(x){}
"""


def own_module(directory: Path, text: str) -> EarlyExitNetwork:
    (directory / "own_module_of_tests.py").write_text(text)
    sys.modules.pop("own_module_of_tests", None)
    importlib.invalidate_caches()
    return with_heads(importlib.import_module("own_module_of_tests").Own())


def test_another_forward_of_the_same_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    found = [key(own_module(tmp_path, SOURCE.format(ending)))["network"] for ending in ("", "", " * 2.0")]
    assert found[0] == found[1] != found[2]
    sys.modules.pop("own_module_of_tests")


def test_a_forward_that_cannot_be_read_has_no_key() -> None:
    names: dict[str, object] = {"__name__": "no_such_file"}
    exec(SOURCE.format(""), names)
    assert key(with_heads(names["Own"]())) is None
