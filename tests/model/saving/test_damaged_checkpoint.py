"""Checkpoints whose bytes, JSON or tensors' headers are damaged: loaded, or refused in one line."""

import json
import random
from pathlib import Path

import pytest
import torch
from auxhead.model import Checkpoint, load_checkpoint, save_checkpoint
from auxhead.model.basics.bad_input import BadInput
from support.checkpoint_files import point_to_parameters, saved_network, weights_of
from support.damaged import UNREADABLE, assert_short, damaged_bytes, damaged_json, make_unreadable, read_damaged
from support.example_models import SmallNet
from support.pictures import whole

pytestmark = pytest.mark.usefixtures("without_interpreter")

DESCRIPTION = "model.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    network = saved_network()
    network.preprocessing = whole(8)
    save_checkpoint(tmp_path, network, backbone="my:net", classes=list("abcde"), accuracy={"test": 0.5})
    return tmp_path


def check(saved: Path, path: Path, content: bytes) -> bool:
    """Whether the damage was refused; what was loaded runs, and names a class for each label.

    An item or a layout that the layers do not have shows as soon as these run.
    """
    backbone = SmallNet()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}

    def load() -> Checkpoint:
        if path.name != DESCRIPTION:
            point_to_parameters(saved)  # else their hash alone would tell the damage
        return load_checkpoint(saved, backbone)

    loaded = read_damaged(path, content, load, BadInput, saved)
    if loaded is None:
        assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())
        assert backbone.training
        return True
    network = loaded.network
    try:
        result = network(torch.randn(2, 3, 8, 8).to(network.heads[0].linear.weight.dtype))
    except ValueError as error:
        assert any(repr(tap) in str(error) for tap in network.taps)
        assert any(extract.item is not None or extract.layout != "NCHW" for extract in network.extract.values())
        return True
    assert all(0 <= label < len(loaded.classes or "abcde") for label in result.label.tolist())
    return False


def test_any_bytes(saved: Path) -> None:
    content = weights_of(saved).read_bytes()
    refused = [check(saved, weights_of(saved), damaged_bytes(content, random.Random(seed))) for seed in range(40)]
    assert 20 < sum(refused) < 40, "some damage does not matter, or cannot be told"
    weights_of(saved).write_bytes(content)
    point_to_parameters(saved)
    path = saved / DESCRIPTION
    content = path.read_bytes()
    refused = [check(saved, path, damaged_bytes(content, random.Random(seed))) for seed in range(40)]
    assert 20 < sum(refused) < 40, "some damage does not matter, or cannot be told"


def test_any_description(saved: Path) -> None:
    content = json.loads((saved / DESCRIPTION).read_bytes())
    path = saved / DESCRIPTION
    refused = [check(saved, path, damaged_json(content, random.Random(seed))) for seed in range(100)]
    assert 60 < sum(refused) < 100


@pytest.mark.parametrize("lost", ["parameters", "preprocessing", "learned_from"])
def test_a_field_that_is_lost_is_damage(saved: Path, lost: str) -> None:
    """Without it the pictures would be prepared in no way, say."""
    content = json.loads((saved / DESCRIPTION).read_bytes())
    del content[lost]
    (saved / DESCRIPTION).write_text(json.dumps(content))
    with pytest.raises(BadInput, match=f"model.json has no {lost}, which format 5 has$"):
        load_checkpoint(saved, SmallNet())


def with_header(content: bytes, header: bytes) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    return len(header).to_bytes(8, "little") + header + content[end:]


def test_any_header_of_tensors(saved: Path) -> None:
    content = weights_of(saved).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for seed in range(40):
        check(saved, weights_of(saved), with_header(content, damaged_json(header, random.Random(seed))))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("backbone.fc.weight", {"dtype": "I32"}),
        ("backbone.fc.weight", {"dtype": "F32", "data_offsets": [0, 320]}),
        ("backbone.fc.weight", {"data_offsets": [2**40, 2**40 + 320]}),
        ("backbone.fc.weight", {"shape": [2**40, 2**40]}),
        ("backbone.fc.weight", {"shape": [16, 5]}),
        ("heads.0.linear.weight", {"dtype": "I32"}),
        ("backbone.block0.1.num_batches_tracked", {"dtype": "F64"}),
    ],
    ids="int overlap beyond huge turned head counter".split(),
)
def test_tensors_that_are_none_of_the_network(saved: Path, name: str, changes: dict[str, object]) -> None:
    content = weights_of(saved).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header[name] |= changes
    assert check(saved, weights_of(saved), with_header(content, json.dumps(header).encode()))


@pytest.mark.parametrize("of", ["parameters", "description"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_no_file_in_its_place(saved: Path, of: str, kind: str) -> None:
    path = saved / DESCRIPTION if of == "description" else weights_of(saved)
    make_unreadable(path, kind)
    with pytest.raises(BadInput) as caught:
        load_checkpoint(saved, SmallNet())
    assert_short(str(caught.value), saved, path.name)
