"""Checkpoints for backbones on the device meta: what is there stays in the file, to be read tensor by tensor."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from auxhead.model import (
    EarlyExitNetwork,
    Extract,
    FusedAuxHead,
    attach_exits,
    calibrate_network,
    load_checkpoint,
    save_checkpoint,
)
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.saving.checkpoint_files import read_tensor
from support.checkpoint_files import point_to_parameters, saved_network, weights_of
from support.example_models import SmallNet, plain_heads
from support.pictures import whole
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")

CPU = torch.device("cpu")


@pytest.fixture
def network() -> EarlyExitNetwork:
    network = saved_network().eval()
    network.preprocessing = whole(8)
    return network


@pytest.fixture
def saved(tmp_path: Path, network: EarlyExitNetwork) -> Path:
    save_checkpoint(tmp_path / "net", network, backbone="my.nets:small", classes=list("abcde"))
    return tmp_path / "net"


def on_meta(make: Callable[[], nn.Module] = SmallNet) -> nn.Module:
    with torch.device("meta"):
        return make()


def read_into(network: EarlyExitNetwork) -> EarlyExitNetwork:
    """Read what is on meta onto the CPU, as what places the parts of a network does."""
    assert network.unread is not None
    for name, value in network.state_dict().items():
        if value.is_meta:
            holder, _, key = name.rpartition(".")
            read = read_tensor(network.unread, name, CPU)
            layer = network.get_submodule(holder)
            setattr(layer, key, nn.Parameter(read) if key in layer._parameters else read)
    return network


def test_the_backbone_stays_on_meta_and_all_else_is_read(saved: Path, network: EarlyExitNetwork) -> None:
    loaded = load_checkpoint(saved, backbone := on_meta())
    assert loaded.network.backbone is backbone and loaded.network.unread == weights_of(saved)
    assert loaded.classes == tuple("abcde") and loaded.preprocessing == network.preprocessing
    assert not any(module.training for module in loaded.network.modules())
    for name, value in network.state_dict().items():
        own = loaded.network.state_dict()[name]
        assert own.is_meta == name.startswith("backbone.") and (own.shape, own.dtype) == (value.shape, value.dtype)
        assert own.is_meta or torch.equal(own, value), name
    assert str(loaded.network.heads) == str(network.heads) and loaded.network.device == CPU
    assert copy.deepcopy(loaded.network).unread == loaded.network.unread


def test_what_is_read_later_gives_the_same_answers(saved: Path, network: EarlyExitNetwork) -> None:
    loaded, x = read_into(load_checkpoint(saved, on_meta()).network), torch.randn(5, 3, 8, 8)
    assert all(torch.equal(a, b) for a, b in zip(loaded(x), network(x), strict=True))
    assert load_checkpoint(saved, SmallNet()).network.unread is None


def test_the_path_does_not_depend_on_the_current_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    loaded = load_checkpoint(saved.name, on_meta()).network
    monkeypatch.chdir("/")
    assert read_tensor(loaded.unread, "backbone.fc.bias", CPU).shape == (5,)


def test_heads_have_values_within_the_with_of_the_backbone(saved: Path, network: EarlyExitNetwork) -> None:
    with torch.device("meta"):
        loaded = load_checkpoint(saved, SmallNet()).network
    assert all(torch.equal(a, b) for a, b in zip(loaded.heads.parameters(), network.heads.parameters(), strict=True))


def test_the_type_that_was_saved_is_that_on_meta(tmp_path: Path, network: EarlyExitNetwork) -> None:
    save_checkpoint(tmp_path, network.bfloat16())
    loaded = load_checkpoint(tmp_path, on_meta()).network
    assert {value.dtype for value in loaded.parameters()} == {torch.bfloat16}
    assert loaded.backbone.block0[1].num_batches_tracked.dtype == torch.int64


def test_of_a_part_on_meta_the_rest_is_loaded(saved: Path, network: EarlyExitNetwork) -> None:
    backbone = SmallNet()
    backbone.block1.to("meta")
    loaded = load_checkpoint(saved, backbone).network
    for name, value in network.state_dict().items():
        own = loaded.state_dict()[name]
        assert own.is_meta == name.startswith("backbone.block1.") and (own.is_meta or torch.equal(own, value)), name
    assert loaded.unread == weights_of(saved)


def test_lazy_layers_on_meta_take_the_sizes_of_the_file(saved: Path) -> None:
    def lazy() -> nn.Module:
        backbone = SmallNet()
        backbone.fc = nn.LazyLinear(5)
        return backbone

    loaded = load_checkpoint(saved, on_meta(lazy)).network
    assert loaded.backbone.fc.weight.is_meta and loaded.backbone.fc.weight.shape == (5, 16)


@pytest.mark.filterwarnings("ignore:The classifier is not shown to be better than chance")
def test_calibration_and_what_was_learned_from_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = EarlyExitNetwork(SmallNet(), plain_heads()).eval()
    held_out = [(torch.randn(60, 3, 8, 8), torch.randint(0, 5, (60,)))]
    report = calibrate_network(network, held_out, max_work=0.9, train=set()).to_json()
    save_checkpoint(tmp_path, network, calibration=report)
    wanted, loaded = load_checkpoint(tmp_path, SmallNet()), load_checkpoint(tmp_path, on_meta())
    assert loaded.calibration == wanted.calibration == json.loads(json.dumps(report))
    assert loaded.network.learned_from is not None and wanted.network.learned_from is not None
    assert loaded.network.learned_from.facts() == wanted.network.learned_from.facts()
    for one, other in zip(loaded.network.learned_from.parts, wanted.network.learned_from.parts, strict=True):
        assert torch.equal(one.hashes, other.hashes)


def changed(change: Callable[[Any], object], make: Callable[[], Any] = SmallNet) -> Callable[[], Any]:
    def make_it() -> Any:
        change(made := make())
        return made

    return make_it


class Rotating(SmallNet):
    """Keeps numbers that no file has, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = nn.Module()
        self.rotary.register_buffer("frequencies", torch.arange(4.0), persistent=False)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "classes": (lambda: SmallNet(classes=7), r"'backbone.fc.*' is \[7.*saved was \[5.*made by my.nets:small"),
    "more": (
        changed(lambda net: net.register_module("more", nn.Linear(2, 2))), "its 'backbone.more.bias' was not saved",
    ),
    "fewer": (
        changed(lambda net: setattr(net.fc, "bias", None)), "it has no 'backbone.fc.bias', which was saved",
    ),
    "integers": (
        changed(lambda net: setattr(net.block0[1], "num_batches_tracked", torch.zeros(()))),
        "num_batches_tracked' is torch.float32, saved was torch.int64",
    ),
    "tap": (changed(lambda net: delattr(net, "block2")), "SmallNet has no layer 'block2'.*made by my.nets:small"),
    "buffer": (
        Rotating,
        "^backbone: its 'rotary.frequencies' is on meta, and not in its state_dict, so that no file has its values; "
        "wants them on the CPU: backbone.get_submodule.'rotary'..frequencies = ",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_a_backbone_that_does_not_fit_is_refused(saved: Path, make: Callable[[], nn.Module], message: str) -> None:
    backbone = on_meta(make)
    dtypes = {name: value.dtype for name, value in backbone.state_dict().items()}
    with pytest.raises(BadInput, match=message):
        load_checkpoint(saved, backbone)
    assert {name: value.dtype for name, value in backbone.state_dict().items()} == dtypes and backbone.training


def test_a_buffer_that_no_file_has_is_taken_as_it_is_given(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, EarlyExitNetwork(Rotating(), plain_heads()).eval())
    backbone = on_meta(Rotating)
    backbone.rotary.frequencies = torch.arange(4.0)
    loaded = load_checkpoint(tmp_path, backbone).network
    assert torch.equal(loaded.backbone.rotary.frequencies, torch.arange(4.0)) and loaded.backbone.fc.bias.is_meta


def test_of_heads_alone_the_backbone_is_nowhere_to_be_read(tmp_path: Path, network: EarlyExitNetwork) -> None:
    save_checkpoint(tmp_path, network, with_backbone=False)
    message = "^backbone: its 'block0.0.weight' is on meta, and .* has the heads alone, so that its values are nowhere"
    with pytest.raises(BadInput, match=message):
        load_checkpoint(tmp_path, on_meta())


def test_modules_of_heads_are_read_whole(tmp_path: Path) -> None:
    def own() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64 * 8, 7), nn.Tanh(), nn.Linear(7, 5))

    extract = {"block0": Extract(layout="NCHW")}
    network = EarlyExitNetwork(
        SmallNet(), {"block0": own()}, extract=extract, example_input=torch.randn(2, 3, 8, 8)
    ).eval()
    save_checkpoint(tmp_path, network)
    loaded = read_into(load_checkpoint(tmp_path, on_meta(), modules={"block0": own()}).network)
    x = torch.randn(3, 3, 8, 8)
    assert all(torch.equal(a, b) for a, b in zip(loaded(x), network(x), strict=True))
    with pytest.raises(BadInput, match=r"^modules\['block0'\]: its '1.weight' is on meta, wants it on the CPU"):
        load_checkpoint(tmp_path, on_meta(), modules={"block0": on_meta(own)})


class WithOwnExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block0, self.block1 = (nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.ReLU()) for i, o in ((3, 8), (8, 12)))
        self.early, self.last = nn.Linear(8, 5), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.block0(x)
        return self.early(x.mean((2, 3))), self.last(self.block1(x).mean((2, 3)))


def test_exits_of_the_models_own_are_not_found_on_meta(tmp_path: Path) -> None:
    x = torch.randn(3, 3, 16, 16)
    network = attach_exits(WithOwnExit().eval(), x)
    save_checkpoint(tmp_path, network)
    with pytest.raises(BadInput, match="^backbone: its 'block0.0.weight' is on meta, and the exits of WithOwnExit are"):
        load_checkpoint(tmp_path, on_meta(WithOwnExit))
    backbone = attach_exits(WithOwnExit().eval(), x).backbone.to("meta")
    loaded = load_checkpoint(tmp_path, backbone).network
    assert all(value.is_meta for value in loaded.backbone.parameters())
    assert all(torch.equal(a, b) for a, b in zip(read_into(loaded)(x), network(x), strict=True))


def test_a_network_without_values_is_not_saved(saved: Path, tmp_path: Path) -> None:
    loaded = load_checkpoint(saved, on_meta()).network
    with pytest.raises(BadInput, match="^network: its state 'backbone.block0.0.weight' is on meta, without values"):
        save_checkpoint(tmp_path / "out", loaded)
    assert not (tmp_path / "out").exists()
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(BadInput, match="'backbone.block0.0.weight' is on meta"):
        save_checkpoint(saved, loaded)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    save_checkpoint(tmp_path / "heads", loaded, with_backbone=False)
    heads = load_checkpoint(tmp_path / "heads", SmallNet()).network.heads
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), loaded.heads.parameters(), strict=True))


@pytest.mark.parametrize("name", ["backbone.fc.weight", "backbone.block0.1.num_batches_tracked"])
def test_a_tensor_has_memory_of_its_own(saved: Path, network: EarlyExitNetwork, name: str) -> None:
    path = weights_of(saved)
    content = path.read_bytes()
    read = read_tensor(path, name, CPU)
    assert torch.equal(read, network.state_dict()[name]) and read.device == CPU
    read.add_(1)
    assert path.read_bytes() == content
    path.write_bytes(b"\0" * len(content))
    assert torch.equal(read, network.state_dict()[name] + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tensor_goes_to_a_gpu(saved: Path, network: EarlyExitNetwork) -> None:
    read = read_tensor(weights_of(saved), "backbone.fc.weight", torch.device("cuda", 0))
    assert read.is_cuda and torch.equal(read.cpu(), network.backbone.fc.weight)


def test_a_tensor_that_cannot_be_read(saved: Path, network: EarlyExitNetwork) -> None:
    path = load_checkpoint(saved, on_meta()).network.unread
    with pytest.raises(BadInput, match="^checkpoint: .*safetensors has no tensor 'backbone.nosuch'"):
        read_tensor(path, "backbone.nosuch", CPU)
    with torch.no_grad():
        network.backbone.fc.bias.add_(1.0)
    save_checkpoint(saved, network)
    with pytest.raises(BadInput, match="^checkpoint: .*safetensors is not there any more: .*load the checkpoint again"):
        read_tensor(path, "backbone.fc.bias", CPU)
    path.write_bytes(b"nothing")
    with pytest.raises(BadInput, match="^checkpoint: .*safetensors is damaged"):
        read_tensor(path, "backbone.fc.bias", CPU)


def test_damage_is_found_in_what_is_not_read(saved: Path) -> None:
    path = weights_of(saved)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput, match="is damaged, or does not belong to model.json beside it: its SHA-256"):
        load_checkpoint(saved, on_meta())


def test_a_type_that_is_not_known(saved: Path) -> None:
    path = weights_of(saved)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["backbone.fc.weight"] |= {"dtype": "F8_E8M0", "shape": [5, 64]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    point_to_parameters(saved)
    known = "has 'backbone.fc.weight' as F8_E8M0, wants one of BOOL, "
    with pytest.raises(BadInput, match=f"^checkpoint: .* ({known}|is damaged)"):  # as older safetensors says
        load_checkpoint(saved, on_meta())


MIB = 2**20


def most_memory(call: Callable[[], object]) -> int:
    """Return by how many bytes the memory of this process grows while something is called, at most."""

    def now(name: str) -> int:
        line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
        return 1024 * int(line.split()[1])

    try:
        Path("/proc/self/clear_refs").write_text("5")  # the highest is that of now
    except OSError:
        pytest.skip("needs Linux's /proc/self/clear_refs")
    before = now("VmRSS")
    call()
    return now("VmHWM") - before


class Large(nn.Sequential):
    """Eight layers of 16 MiB."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)), nn.Linear(2048, 5))


def test_loading_and_reading_take_the_memory_of_one_tensor(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, EarlyExitNetwork(Large(), {"0": FusedAuxHead(2048, 5)}).eval())
    loaded: list[EarlyExitNetwork] = []
    assert most_memory(lambda: loaded.append(load_checkpoint(tmp_path, on_meta(Large)).network)) < 16 * MIB
    names = [f"backbone.{layer}.weight" for layer in range(8)]
    reads = most_memory(lambda: [read_tensor(loaded[0].unread, name, CPU) is None for name in names])
    assert reads < 64 * MIB, "a tensor in the file and its copy, and what the allocator has not given back"
    assert most_memory(lambda: load_checkpoint(tmp_path, Large())) > 120 * MIB, "all of it, if it is not on meta"
