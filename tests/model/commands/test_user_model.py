"""The user's model found by name, and the errors if it is not."""

import sys

import pytest
import torch
import typer
from auxhead.model import EarlyExitNetwork
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.commands.errors import one_line_errors
from auxhead.model.commands.user_model import load_factory

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
def package(tmp_path, monkeypatch):
    """A package in the current directory, which is nowhere in sys.path; returns its name."""
    folder = tmp_path / "my_package"
    folder.mkdir()
    (folder / "my_model.py").write_text(SOURCE)
    (folder / "lacks.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield "my_package"
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


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
