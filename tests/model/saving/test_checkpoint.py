"""Checkpoints: saving and loading of networks, whole or heads alone, and files that are refused."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead, attach_exits, load_checkpoint, save_checkpoint
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.basics.images import open_image
from auxhead.model.basics.preprocessing import Preprocessing
from support.checkpoint_files import saved_network, weights_of
from support.example_models import SmallNet, plain_heads
from support.pictures import write_image_folder
from torch import nn

pytestmark = pytest.mark.usefixtures("without_interpreter")

PREPARED = Preprocessing(8, 9, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", antialias=False)
ABOUT = {"backbone": "my.nets:small", "classes": list("abcdç"), "accuracy": {"test": 0.5}}


@pytest.fixture
def network() -> EarlyExitNetwork:
    network = saved_network()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):  # not what a fresh network has
            module.running_mean.normal_(0, 0.1)
    network.preprocessing = PREPARED
    return network.eval()


@pytest.fixture
def saved(tmp_path: Path, network: EarlyExitNetwork) -> Path:
    save_checkpoint(tmp_path / "new" / "net", network, **ABOUT)
    return tmp_path / "new" / "net"


def images(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8)


def assert_same_answers(mine: EarlyExitNetwork, theirs: EarlyExitNetwork) -> None:
    x = images().to(theirs.heads[0].linear.weight)
    assert all(torch.equal(a, b) for a, b in zip(mine(x), theirs(x), strict=True))
    assert str(mine) == str(theirs)


def test_the_same_answers_come_back(saved: Path, network: EarlyExitNetwork) -> None:
    loaded = load_checkpoint(str(saved), SmallNet())
    assert loaded.classes == tuple("abcdç") and loaded.accuracy == {"test": 0.5}
    assert loaded.preprocessing == loaded.network.preprocessing == PREPARED
    assert not any(module.training for module in loaded.network.modules())
    assert all(parameter.requires_grad for parameter in loaded.network.parameters())
    assert_same_answers(loaded.network, network)
    for name, value in network.state_dict().items():
        assert torch.equal(loaded.network.state_dict()[name], value), name


def test_the_type_of_the_parameters_comes_back(tmp_path: Path, network: EarlyExitNetwork) -> None:
    network.preprocessing = None
    save_checkpoint(tmp_path, network.bfloat16())
    loaded = load_checkpoint(tmp_path, SmallNet())
    assert loaded.classes == () and loaded.network.preprocessing is None
    assert_same_answers(loaded.network, network)


def test_heads_alone_go_to_the_users_backbone(tmp_path: Path, network: EarlyExitNetwork) -> None:
    save_checkpoint(tmp_path, network, with_backbone=False)
    mine = copy.deepcopy(network.backbone)
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    loaded = load_checkpoint(tmp_path, mine)
    assert loaded.network.backbone is mine
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items())
    assert_same_answers(loaded.network, network)
    assert weights_of(tmp_path).stat().st_size < 4000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(tmp_path: Path, network: EarlyExitNetwork) -> None:
    network.cuda().half()
    save_checkpoint(tmp_path, network)
    loaded = load_checkpoint(tmp_path, SmallNet().cuda())
    assert all(value.is_cuda for value in loaded.network.parameters())
    assert_same_answers(loaded.network, network)


def test_memory_that_is_shared_is_saved(tmp_path: Path) -> None:
    backbone = SmallNet()
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), backbone.fc)
    network = EarlyExitNetwork(backbone, {"block2": head}).eval()
    save_checkpoint(tmp_path, network)
    assert_same_answers(load_checkpoint(tmp_path, SmallNet()).network, network)


def test_pictures_become_input(saved: Path, tmp_path: Path) -> None:
    paths = sorted(write_image_folder(tmp_path / "pictures", per_class=2).glob("*/*.png"))[:3]
    loaded = load_checkpoint(saved, SmallNet())
    x = loaded.read_images(paths)
    wanted = torch.stack([PREPARED.pipeline()(open_image(path)) for path in paths])
    assert x.dtype == torch.float32 and torch.equal(x, wanted)
    assert loaded.network(x).label.shape == (3,)
    loaded.network.half()
    assert torch.equal(loaded.read_images(paths), x.half())


HEAD_FIELDS = ["in_features", "num_classes", "pool", "pool_size", "bias", "dropout", "return_probs", "extract", "rule"]


def with_hidden_layers() -> EarlyExitNetwork:
    norm = nn.LayerNorm(16, eps=1e-3, bias=False)
    heads = {
        "block0": FusedAuxHead(8, 5, hidden_features=9, activation="gelu_tanh", hidden_bias=False, hidden_dropout=0.2),
        "block1": FusedAuxHead(12, 5, pool="max", norm=True, rectifies=True),
        "block2": nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), norm, nn.Linear(16, 7), nn.Hardswish(), nn.Linear(7, 5)),
    }
    return EarlyExitNetwork(SmallNet(), heads, 0.3, example_input=images(2)).eval()


def test_hidden_layers_come_back(tmp_path: Path) -> None:
    network = with_hidden_layers()
    save_checkpoint(tmp_path, network)
    loaded = load_checkpoint(tmp_path, SmallNet()).network
    assert_same_answers(loaded, network)
    assert [head.map_size for head in loaded.fused_heads] == [None, None, (2, 2)]
    assert loaded.fused_heads[2].hidden.norm.eps == 1e-3 and loaded.fused_heads[2].hidden.norm.bias is None
    save_checkpoint(tmp_path / "again", loaded)
    for name in ("model.json", weights_of(tmp_path).name):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_heads_without_hidden_layers_have_no_fields_of_any(saved: Path) -> None:
    content = json.loads((saved / "model.json").read_text())
    assert content["format"] == 5 and all(list(head) == HEAD_FIELDS for head in content["heads"].values())


@pytest.mark.parametrize(
    "tap, change, message",
    [
        ("block0", {"hidden": {"features": 0}}, "hidden: features: got 0, wants None or an int from 1 to 1024"),
        ("block0", {"hidden": {"features": 8}}, r"its 'heads.0.linear.weight' is \[5, 8\], saved was \[5, 9\]"),
        ("block0", {"hidden": {"activation": "tanh"}}, "hidden: activation: got 'tanh', wants one of"),
        ("block0", {"hidden": {"norm": True}}, "hidden: norm: got True, wants fields of a norm or None"),
        ("block1", {"hidden": {"norm": {"eps": -1}}}, "hidden: norm: eps: got -1, wants a number from 0"),
        ("block1", {"hidden": {"more": 1}}, "hidden: more, which a hidden part has not"),
        ("block1", {"hidden": {"norm": None}}, "has no 'heads.1.hidden.norm.bias', which was saved"),
        ("block2", {"map_size": [0, 2]}, "map_size: got .0, 2., wants two positive ints"),
        ("block2", {"hidden": None}, "hidden: got None, wants fields of hidden layers"),
        ("block2", {"in_features": 2**30}, "saved was .7, 16."),
        ("block2", {"num_classes": 2**30}, "wants one|saved was"),
    ],
)
def test_fields_of_heads_with_hidden_layers_that_are_wrong(tmp_path: Path, tap: str, change: Any, message: str) -> None:
    save_checkpoint(tmp_path, with_hidden_layers())
    content = json.loads((tmp_path / "model.json").read_text())
    content["heads"][tap] = merged(content["heads"][tap], change)
    (tmp_path / "model.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=message):
        load_checkpoint(tmp_path, SmallNet())


def merged(content: Any, change: Any) -> Any:
    """JSON with other values at some places."""
    if not (isinstance(content, dict) and isinstance(change, dict)):
        return change
    return {**content, **{name: merged(content.get(name), value) for name, value in change.items()}}


class WithRule(SmallNet):
    """A layer of its own has the name that rules have in heads."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Module()
        self.head.rule = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head.rule(super().forward(x))


class Lazy(SmallNet):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(5)


@pytest.mark.parametrize(("kind", "other"), [(WithRule, WithRule), (SmallNet, Lazy)])
def test_all_parameters_of_a_backbone_come_back(tmp_path: Path, kind: type[nn.Module], other: type[nn.Module]) -> None:
    network = EarlyExitNetwork(kind(), plain_heads(), 0.5).eval()
    save_checkpoint(tmp_path, network)
    loaded, x = load_checkpoint(tmp_path, other()).network, images()
    assert all(torch.equal(a, b) for a, b in zip(loaded(x), network(x), strict=True))


class WithOwnExits(nn.Module):
    def __init__(self, classes: int = 5, taps: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.block0, self.block1 = (nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.ReLU()) for i, o in ((3, 8), (8, 12)))
        self.exits, self.taps = nn.ModuleList(nn.Linear(width, classes) for width in (8, 12)), taps
        self.last = nn.Linear(12, classes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        maps = [self.block0(x)]
        maps.append(self.block1(maps[0]))
        return *(self.exits[tap](maps[tap].mean((2, 3))) for tap in self.taps), self.last(maps[1].mean((2, 3)))


class Words(WithOwnExits):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 3 * 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(self.words(x).unflatten(2, (3, 16)).movedim(2, 1))


@pytest.mark.parametrize("with_backbone", [True, False])
@pytest.mark.parametrize(
    ("kind", "x"), [(WithOwnExits, torch.randn(3, 3, 16, 16)), (Words, torch.arange(24).view(3, 8) % 7)]
)
def test_a_model_with_exits_of_its_own_comes_back(
    tmp_path: Path, kind: Any, x: torch.Tensor, with_backbone: bool
) -> None:
    torch.manual_seed(1)
    model = kind().eval()
    network = attach_exits(model, x, rules=ExitRule(0.21, temperature=2.0))
    save_checkpoint(tmp_path, network, with_backbone=with_backbone)
    mine = kind()
    if not with_backbone:
        mine.load_state_dict(model.state_dict())
    loaded = load_checkpoint(tmp_path, mine)
    assert all(torch.equal(a, b) for a, b in zip(loaded.network(x), network(x), strict=True))
    assert not mine.training and all(torch.equal(a, b) for a, b in zip(mine(x), model(x), strict=True))
    save_checkpoint(tmp_path / "again", loaded.network, with_backbone=with_backbone)
    assert (tmp_path / "again" / "model.json").read_bytes() == (tmp_path / "model.json").read_bytes()
    as_backbone = load_checkpoint(tmp_path, attach_exits(model, x).backbone).network
    assert torch.equal(as_backbone(x).exit_index, network(x).exit_index)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (WithOwnExits(6), "its exit at 'model.block0' has num_classes 6, saved was 5"),
        (WithOwnExits(taps=(0, 1)), "it has an exit at 'model.block1', where none was saved"),
        (WithOwnExits(taps=(1,)), "it has no exit at 'model.block0', where one was saved"),
        (
            nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            "wants the model that was handed to",
        ),
    ],
)
def test_a_model_with_other_exits_is_refused_and_left_alone(tmp_path: Path, other: nn.Module, message: str) -> None:
    save_checkpoint(tmp_path, attach_exits(WithOwnExits().eval(), images(2)))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(BadInput, match=f"backbone: the exits of .* cannot be found as they were in .*{message}"):
        load_checkpoint(tmp_path, other)
    assert other.training and all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_exits_that_run_as_the_models_own_code_want_the_model_itself(tmp_path: Path) -> None:
    class Scaled(WithOwnExits):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            early, last = super().forward(x)
            return early * self.last.bias.exp(), last

    network = attach_exits(Scaled().eval(), images(2))
    save_checkpoint(tmp_path, network)
    assert torch.equal(load_checkpoint(tmp_path, Scaled()).network(images(2)).label, network(images(2)).label)
    with pytest.raises(BadInput, match="the exit at .* runs as the model's own code; wants the model that was"):
        load_checkpoint(tmp_path, attach_exits(Scaled().eval(), images(2)).backbone)


class HeadOfAnotherKind(FusedAuxHead):
    pass


def parametrized() -> FusedAuxHead:
    head = FusedAuxHead(8, 5)
    torch.nn.utils.parametrizations.weight_norm(head.linear)
    return head


class WithNotes(SmallNet):
    def get_extra_state(self) -> dict[str, int]:
        return {"epochs": 3}


def changed(change: Callable[[Any], object], make: Callable[[], Any] = saved_network) -> Callable[[], Any]:
    def make_it() -> Any:
        change(made := make())
        return made

    return make_it


def on_block0(head: FusedAuxHead) -> Callable[[], EarlyExitNetwork]:
    return lambda: EarlyExitNetwork(SmallNet(), {"block0": head})


def plain() -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(), plain_heads())


NOT_SAVED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "no network": (SmallNet, {}, "^network: got SmallNet, wants an EarlyExitNetwork"),
    "head": (on_block0(HeadOfAnotherKind(8, 5)), {}, "'block0'.*HeadOfAnotherKind"),
    "lazy": (on_block0(FusedAuxHead(None, 5)), {}, "'block0'.*check_taps"),
    "parametrized": (on_block0(parametrized()), {}, "'block0'.*parametrizations"),
    "state": (lambda: EarlyExitNetwork(WithNotes(), plain_heads()), {}, "'backbone._extra_state' is a dict"),
    "classes": (plain, {"classes": ["a"]}, "^classes: got 1 names, wants 5"),
    "text": (plain, {"classes": "abcde"}, "^classes: got 'abcde', wants a list"),
    "backbone": (plain, {"backbone": SmallNet}, "^backbone: got <class.*a str"),
    "accuracy": (plain, {"accuracy": {"test": "good"}}, "^accuracy: .*numbers"),
    "report": (plain, {"calibration": {"format": "a", "drop": math.nan}}, "^calibration: got .*report"),
    "sparse": (
        changed(lambda net: net.backbone.register_buffer("edges", torch.eye(3).to_sparse())), {},
        "'backbone.edges' is a ",
    ),
    "of the network": (changed(lambda net: net.register_buffer("mine", torch.ones(2))), {}, "^network: keeps 'mine'"),
    "of a head": (
        changed(lambda net: net.heads[1].linear.register_buffer("mine", torch.ones(2))), {}, "'block1'.*'linear.mine'",
    ),
    "rule": (
        changed(lambda net: net.heads[1].rule.threshold_tensor.fill_(2.0)), {}, "'block1'.*: threshold: got 2.0",
    ),
    "field": (
        changed(lambda net: setattr(net.heads[1], "return_probs", 1)), {},
        "'block1'.*: return_probs: got 1, wants a bool",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("made", "arguments", "message"), NOT_SAVED.values(), ids=NOT_SAVED)
def test_what_could_not_be_loaded_is_not_saved(
    tmp_path: Path, made: Callable[[], EarlyExitNetwork], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        save_checkpoint(tmp_path / "out", made(), **arguments)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="^directory: got .*out, a file, wants a directory"):
        save_checkpoint(tmp_path / "out", plain())


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (lambda: SmallNet(classes=7), r"'backbone.fc.*' is \[7.*saved was \[5.*made by my.nets:small"),
        (
            changed(lambda net: net.register_module("more", nn.Linear(2, 2)), SmallNet),
            "its 'backbone.more.bias' was not saved",
        ),
        (changed(lambda net: setattr(net.fc, "bias", None), SmallNet), "it has no 'backbone.fc.bias', which was saved"),
        (
            changed(lambda net: setattr(net.fc.weight, "data", net.fc.weight.data.to(torch.float8_e4m3fn)), SmallNet),
            "its 'backbone.fc.weight' is torch.float8_e4m3fn, saved was torch.float32",
        ),
        (
            changed(lambda net: delattr(net, "block2"), SmallNet),
            "SmallNet has no layer 'block2'.*made by my.nets:small",
        ),
        (lambda: "resnet18", "^backbone: got str, wants an nn.Module, .*; it was made by my.nets:small"),
        (lambda: EarlyExitNetwork(SmallNet(), {"block0": FusedAuxHead(8, 5)}), "got EarlyExitNetwork, .*without heads"),
    ],
    ids=["classes", "more", "fewer", "eight-bits", "tap", "no-module", "heads"],
)
def test_a_backbone_that_does_not_fit_is_left_as_it_was(saved: Path, backbone: Callable[[], Any], message: str) -> None:
    mine = backbone()
    before = copy.deepcopy(mine)
    with pytest.raises(BadInput, match=message):
        load_checkpoint(saved, mine)
    if isinstance(mine, nn.Module):
        parameters = zip(mine.parameters(), before.parameters(), strict=True)
        assert all(a.dtype == b.dtype and torch.equal(a.float(), b.float()) for a, b in parameters)
        assert mine.training


def with_head(description: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"heads": {tap: {**head, **changes} for tap, head in description["heads"].items()}}


def prepared(**changes: Any) -> dict[str, Any]:
    return {"preprocessing": {**PREPARED.as_json(), **changes}}


A_RULE = {"threshold": 0.5, "criterion": "max_prob", "temperature": 1.0, "enabled": True}


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def other_classes(heads: dict[str, Any]) -> dict[str, Any]:
    return {**heads, "block0": {**heads["block0"], "num_classes": 4}}


BAD_DESCRIPTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "older": (lambda _: {"format": 4}, r"has format 4, wants 5; written by another version\? Load it with that "),
    "newer": (lambda _: {"format": 6}, "has format 6, wants 5; written by a newer version"),
    "report": (lambda _: {"calibration": {}}, "has calibration: got {}, wants a report, as its to_json"),
    "size": (lambda _: prepared(crop="16"), "has preprocessing: crop: got '16', wants a positive int, of 89,478,485"),
    "pixels": (lambda _: prepared(crop=10_000), "has preprocessing: crop: got 10000, wants .* of 89,478,485 pixels at"),
    "smaller": (lambda _: prepared(resize=7), "has preprocessing: resize: got 7, wants 8 at least, as crop is"),
    "std": (lambda _: prepared(std=[0.5, 0.5, 0.0]), "has preprocessing: std: got .*, wants numbers greater than 0"),
    "nan": (lambda _: prepared(mean=[0.5, 0.5, math.nan]), "has preprocessing: mean: got .*, wants three numbers for"),
    "large": (lambda _: prepared(mean=[10**400, 0, 0]), "has preprocessing: mean: got .*, wants three numbers"),
    "channels": (lambda _: prepared(channels=1), "has preprocessing: channels: got 1, wants 3, as mean has"),
    "way": (lambda _: prepared(interpolation="best"), "has preprocessing: interpolation: got 'best', wants one of"),
    "pixels by a number": (lambda _: {"preprocessing": 8}, "has preprocessing: got 8, wants an object or None"),
    "half a preprocessing": (lambda _: {"preprocessing": {"crop": 8}}, "has preprocessing: got .*, wants crop, "),
    "path": (lambda _: {"parameters": "../x"}, "has parameters: got .*, wants the SHA-256 of a file"),
    "no hash": (lambda _: {"parameters": None}, "has parameters: got None, wants the SHA-256 of a file"),
    "memory of an input": (
        lambda _: {"own_exits": {"input": [2**20, 2**20], "dtype": "int64", "final": None}}, "has own_exits: got .*",
    ),
    "type": (lambda _: {"own_exits": {"input": [3], "dtype": "load", "final": None}}, "has own_exits: got .*"),
    "extra key": (lambda _: {"surprise": 1}, "has surprise, which format 5 has not"),
    "no heads": (lambda _: {"heads": {}}, "has heads: got {}, wants heads by tap"),
    "pool": (lambda old: with_head(old, pool="median"), "has a head 'block0' that cannot be made: pool: got 'median'"),
    "head's key": (lambda old: with_head(old, surprise=1), "has a head 'block0' that cannot be made"),
    "threshold": (lambda old: with_head(old, rule={**A_RULE, "threshold": 1.5}), "cannot be made: threshold: got 1.5"),
    "half a rule": (lambda old: with_head(old, rule={"threshold": 0.5}), "made: rule: no criterion, which"),
    "lazy": (lambda old: with_head(old, in_features=None), "in_features: got None, wants a positive int"),
    "memory": (lambda old: with_head(old, in_features=2**30), r"is \[5, 1073741824\], saved was \[5, 8\]"),
    "all classes": (lambda old: with_head(old, num_classes=4) | {"classes": []}, r"is \[4, 8\], saved was \[5, 8\]"),
    "classes": (lambda old: {"heads": other_classes(old["heads"])}, "has heads of 4 and 5 classes, wants one"),
    "names": (lambda _: {"classes": ["a"]}, "has 1 names of classes, wants 5 or none"),
    "surrogate": (lambda _: {"classes": ["a", "b", "c", "d", "\ud800"]}, "has classes: got .*, wants a list of names"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_DESCRIPTIONS.values(), ids=BAD_DESCRIPTIONS)
def test_descriptions_that_do_not_fit(saved: Path, change: Callable[[Any], Any], message: str) -> None:
    path = saved / "model.json"
    old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, **change(old)}))
    with pytest.raises(BadInput, match=message):
        load_checkpoint(saved, SmallNet())


def test_a_calibration_that_does_not_say_what_it_is_of_is_refused(saved: Path) -> None:
    network = load_checkpoint(saved, SmallNet()).network
    for lacks in ("rules", "parameters"):
        report = without({"format": "a report", "rules": [], "parameters": []}, lacks)
        with pytest.raises(ValueError, match="^calibration: does not say of which rules and parameters it is; wants"):
            save_checkpoint(saved, network, calibration=report)
    assert load_checkpoint(saved, SmallNet()).calibration is None


class Versioned(SmallNet):
    """A backbone that reads its version from a state_dict, as torchvision's MnasNet does."""

    _version = 2

    def _load_from_state_dict(self, state: dict, prefix: str, metadata: dict, *rest: object) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_modules_find_their_versions(tmp_path: Path) -> None:
    network = EarlyExitNetwork(Versioned(), plain_heads(), example_input=torch.randn(2, 3, 8, 8)).eval()
    save_checkpoint(tmp_path / "saved", network)
    assert load_checkpoint(tmp_path / "saved", Versioned()).network.taps == network.taps
