"""The user's model and modules found by name, in commands as well, and the errors if they are not."""

import json

import pytest
import torch
import typer
from auxhead.model import EarlyExitNetwork, FusedAuxHead, ModuleHead, load_checkpoint, save_checkpoint
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.commands.errors import one_line_errors
from auxhead.model.commands.user_model import load_factory
from support.command_line import assert_one_line_error, auxhead
from support.pictures import whole, write_image_folder
from torch import nn

SOURCE = """
import torch
from auxhead.model import EarlyExitNetwork
from support.example_models import SmallNet, plain_heads
from support.multi_exit_models import InAList

NUMBER = 5

def good():
    return EarlyExitNetwork(SmallNet(), plain_heads()).eval(), torch.zeros(2, 3, 16, 16)

def with_exits():
    return InAList(), torch.zeros(2, 3, 16, 16)

def without_exits():
    return SmallNet(), torch.zeros(2, 3, 16, 16)

def half():
    return good()[0]

def swapped():
    return good()[::-1]

def too_much():
    return *good(), 1

def empty():
    return good()[0], torch.zeros(0, 3, 16, 16)

def fails():
    raise RuntimeError("not found: weights.pt")

def takes(i, *, o):
    return good()
"""


@pytest.fixture
def package(users_folder):
    """A package in the current directory; returns its name."""
    folder = users_folder / "my_package"
    folder.mkdir()
    (folder / "my_model.py").write_text(SOURCE)
    (folder / "lacks.py").write_text("import a_module_that_is_not_there\n")
    return "my_package"


def test_a_factory_in_the_current_directory(package):
    made = load_factory(f"{package}.my_model:good")()
    assert isinstance(made.network, EarlyExitNetwork) and made.example_input.shape == (2, 3, 16, 16)
    network, x = load_factory(f"{package}.my_model:good")()
    assert network is not made.network and isinstance(x, torch.Tensor)


def test_a_model_with_exits_becomes_a_network(package):
    network, x = load_factory(f"{package}.my_model:with_exits")()
    assert isinstance(network, EarlyExitNetwork) and network.taps == ("model.blocks.0", "model.blocks.1")
    assert not network.training and network(x).label.shape == (2,)


def test_what_is_not_there_is_named(package):
    for spec, message in (
        ("nowhere", "--model: got 'nowhere', wants package.module:function"),
        ("my_package/my_model.py:good", "wants package.module:function"),
        (":good", "wants package.module:function"),
        ("nowhere:good", "--model: no module 'nowhere' in "),
        ("my_package.my_model.deeper:good", "--model: no module 'my_package.my_model.deeper' in "),
        ("my_package.my_model:nothing", "--model: got 'nothing' of my_package.my_model .*, which it does not have"),
        ("my_package.my_model:god", "which it does not have; wants a function; close to it: good$"),
        ("my_model.py:good", r"; did you mean my_model:good\?$"),
        ("my_package.my_model:NUMBER", "--model: got 'NUMBER' of my_package.my_model .*, which cannot be called"),
        ("my_package.my_model:takes", r"--model: my_package.my_model:takes takes arguments \(i, \*, o\), wants a"),
    ):
        with pytest.raises(BadInput, match=message):
            load_factory(spec)


def test_what_a_factory_returns_is_checked(package):
    for name, message in (
        ("half", r"returned \(EarlyExitNetwork\), wants \(EarlyExitNetwork, Tensor\)"),
        (
            "without_exits",
            r"model: returned a tensor \[2, 5\] of torch.float32 at the top, in which 1 exit can be told",
        ),
        ("swapped", r"returned \(Tensor, EarlyExitNetwork\), wants"),
        ("too_much", r"returned \(EarlyExitNetwork, Tensor, int\), wants"),
        ("empty", r"returned an input of shape \[0, 3, 16, 16\], wants a batch of samples"),
    ):
        factory = load_factory(f"{package}.my_model:{name}")
        with pytest.raises(BadInput, match=f"--model: {package}.my_model:{name}:? {message}"):
            factory()


def test_errors_of_the_users_own_code_come_through(package):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load_factory(f"{package}.lacks:good")
    with pytest.raises(RuntimeError, match="not found: weights.pt"):
        load_factory(f"{package}.my_model:fails")()


def test_a_command_shows_them_from_the_users_first_line_on(package, capsys):
    with pytest.raises(typer.Exit) as left, one_line_errors():
        load_factory(f"{package}.my_model:fails")()
    first, place, line, *_ = capsys.readouterr().err.splitlines()
    assert left.value.exit_code == 1 and first.startswith("Traceback")
    assert "my_model.py" in place and place.endswith("in fails") and "weights.pt" in line
    with pytest.raises(RuntimeError, match="of ours"), one_line_errors():
        raise RuntimeError("of ours")


pytestmark = pytest.mark.usefixtures("without_interpreter", "undrawn")

OWN = """
import torch
from torch import nn

def backbone():
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU()), nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()),
        nn.Flatten(), nn.Linear(8 * 25, 2),
    )

def branch():
    return nn.Sequential(nn.Conv2d(8, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 2))

def modules():
    return {"0": branch()}

def network():
    from auxhead.model import EarlyExitNetwork, FusedAuxHead
    heads = {"0": branch(), "1": FusedAuxHead(8, 2)}
    return EarlyExitNetwork(backbone(), heads, example_input=torch.zeros(2, 3, 16, 16)), torch.zeros(2, 3, 16, 16)

def network_alone():
    return network()[0]

def as_list():
    return [branch()]

def empty():
    return {}

def other_tap():
    return {"0": branch(), "1": branch()}

def no_module():
    return {"0": "branch"}

def too_wide():
    return {"0": nn.Sequential(nn.Conv2d(8, 5, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 9, 2))}
"""
SAVED = ("own", "--device", "cpu")
CLASSES = ("lying", "standing")


@pytest.fixture
def own(users_folder):
    """A folder with pictures, a checkpoint "own" with a module and a fused head, and the code that makes its parts."""
    (users_folder / "own_parts.py").write_text(OWN)
    write_image_folder(users_folder / "pictures", per_class=60)
    scope: dict = {}
    exec(OWN, scope)
    torch.manual_seed(0)
    heads = {"0": scope["branch"](), "1": FusedAuxHead(8, 2)}
    network = EarlyExitNetwork(scope["backbone"](), heads, 0.51, example_input=torch.zeros(2, 3, 16, 16)).eval()
    network.preprocessing = whole(16)
    save_checkpoint(users_folder / "own", network, backbone="own_parts:backbone", classes=CLASSES)
    return scope


def loaded(scope, directory):
    return load_checkpoint(directory, scope["backbone"](), modules=scope["modules"]())


#: Ways to hand over what the checkpoint does not hold.
GIVEN = {
    "backbone and modules": ("--backbone", "own_parts:backbone", "--modules", "own_parts:modules"),
    "network that has them": ("--backbone", "own_parts:network"),
    "without a batch": ("--backbone", "own_parts:network_alone"),
    "both": ("--backbone", "own_parts:network", "--modules", "own_parts:modules"),
}


@pytest.mark.parametrize("given", GIVEN)
def test_infer_answers_by_the_modules(own, tmp_path, given):
    result = auxhead("infer", *SAVED, "pictures", *GIVEN[given], "--json", "answers.jsonl")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    checkpoint = loaded(own, tmp_path / "own")
    answer = checkpoint.network(checkpoint.read_images([tmp_path / line["image"] for line in lines]))
    assert [line["class_index"] for line in lines] == answer.label.tolist()
    assert [line["exit_index"] for line in lines] == answer.exit_index.tolist() and (answer.exit_index == 0).any()


def test_what_is_calibrated_has_the_modules_and_is_taken_again(own, tmp_path):
    given = "without a batch"
    result = auxhead("calibrate", *SAVED, *GIVEN[given], "--data", "pictures", "--max-work", 0.7, "--out", "new")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    network, before = loaded(own, tmp_path / "new").network, loaded(own, tmp_path / "own").network
    assert isinstance(network.heads[0], ModuleHead)
    assert [head.rule.temperature for head in network.exit_heads] == [
        row["temperature"] for row in report["exits"][:-1]
    ]
    for name, value in before.state_dict().items():
        assert ".rule." in name or torch.equal(value, network.state_dict()[name]), name
    again = auxhead("infer", "new", "pictures/lying/0.png", "--device", "cpu", *GIVEN[given])
    assert again.exit_code == 0, again.output


BAD = {
    "nothing": (
        None,
        "--modules: got none for the head at '0' in own, a module of yours (Sequential) of which the parameters",
    ),
    "no such function": ("own_parts:absent", "--modules: got 'absent' of own_parts"),
    "list": ("own_parts:as_list", "--modules: own_parts:as_list returned list, wants a dict of modules by tap"),
    "missing": ("own_parts:empty", "--modules: own_parts:empty returned none for the head at '0' in own, a module of"),
    "surplus": ("own_parts:other_tap", "--modules: own_parts:other_tap returned a module for 1, wants 0"),
    "no module": ("own_parts:no_module", "--modules: own_parts:no_module returned str for 0, wants an nn.Module"),
    "too wide": (
        "own_parts:too_wide",
        "modules['0']: Sequential does not fit own: its '0.weight' is [5, 8, 3, 3], sav",
    ),
}


def test_what_is_no_dict_of_these_modules_is_one_line(own, tmp_path):
    for kind, (spec, message) in BAD.items():
        for command in ("infer pictures", *(["calibrate --data pictures --out new"] if kind == "missing" else [])):
            modules = () if spec is None else ("--modules", spec)
            result = auxhead(
                command.split()[0], *SAVED, *command.split()[1:], "--backbone", "own_parts:backbone", *modules
            )
            assert_one_line_error(result, message)
    assert not (tmp_path / "new").exists()


def test_modules_for_a_checkpoint_without_any_are_refused(own, tmp_path):
    network = EarlyExitNetwork(nn.Sequential(*own["backbone"]()), {"0": FusedAuxHead(8, 2)}).eval()
    network.preprocessing = whole(16)
    save_checkpoint(tmp_path / "own", network, classes=CLASSES)
    given = ("--backbone", "own_parts:backbone", "--modules")
    message = "returned a module for 0, wants none: all heads of the checkpoint are fused"
    assert_one_line_error(auxhead("infer", *SAVED, "pictures", *given, "own_parts:modules"), message)
    assert auxhead("infer", *SAVED, "pictures/lying/0.png", *given, "own_parts:empty").exit_code == 0


def test_a_network_of_torchvision_takes_modules_by_its_name(own, tmp_path):
    import torchvision

    backbone = torchvision.models.shufflenet_v2_x0_5(num_classes=2)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 2))
    network = EarlyExitNetwork(backbone, {"stage2": ModuleHead(head)}, example_input=torch.zeros(2, 3, 32, 32)).eval()
    named = "torchvision.models:shufflenet_v2_x0_5"
    network.preprocessing = whole(32)
    save_checkpoint(tmp_path / "own", network, backbone=named, classes=CLASSES)
    assert_one_line_error(auxhead("infer", *SAVED, "pictures"), "--modules: got none for the head at 'stage2' in own")
    (tmp_path / "own_head.py").write_text(
        "from torch import nn\n\ndef make():\n"
        "    layers = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(192), nn.Linear(192, 2)\n"
        "    return {'stage2': nn.Sequential(*layers)}\n"
    )
    result = auxhead("infer", *SAVED, "pictures", "--modules", "own_head:make")
    assert result.exit_code == 0, result.output
