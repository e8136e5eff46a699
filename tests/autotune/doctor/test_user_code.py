"""Errors of the user's own code: status 2, its traceback from its first frame on, and last one line with the place."""

import contextlib
from pathlib import Path

import pytest
import torch
from auxhead.autotune.doctor import script
from auxhead.autotune.doctor.profile_live import find_target
from auxhead.autotune.doctor.user_code import UserCodeError
from auxhead.model.basics.bad_input import BadInput
from support.command_line import assert_one_line_error, tune

MODULE = """
import torch

def factory():
    raise ValueError("my model needs weights\\nand so on")

def silent():
    raise KeyError

def of_auxhead():
    from auxhead.model import load_checkpoint
    load_checkpoint("nowhere", Net())

def leaves():
    raise SystemExit(3)

class Net(torch.nn.Module):
    def forward(self, x):
        return self.part(x)

    def part(self, x):
        return x @ x

def forward_fails():
    return Net(), torch.ones(2, 3)

def input_does_not_fit():
    return torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.ones(2, 3)

def takes(size, *, more=1):
    return Net(), torch.ones(size)

def may_take(size=1):
    return Net(), torch.ones(size, size)
"""


@pytest.fixture
def folder(users_folder):
    """The current directory, with modules of a user's."""
    (users_folder / "errs_mod.py").write_text(MODULE)
    (users_folder / "errs_import.py").write_text("import torch\nimport no_module_of_that_name\n")
    (users_folder / "errs_syntax.py").write_text("x = 1\ndef f(:\n")
    (users_folder / "errs_outer.py").write_text("\n\nimport errs_syntax\n")
    return users_folder


def test_a_module_that_cannot_be_imported(folder):
    syntax = "raised SyntaxError: {} (errs_syntax.py:2)"
    missing = "raised ModuleNotFoundError: No module named 'no_module_of_that_name' (errs_import.py:2)"
    for module, message, first in (
        ("errs_import", missing, 'errs_import.py", line 2, in <module>'),
        ("errs_syntax", syntax, 'errs_syntax.py", line 2'),
        ("errs_outer", syntax, 'errs_outer.py", line 3, in <module>'),
    ):
        result = tune("doctor", f"{module}:f")
        assert result.exit_code == 2 and not (folder / "auxhead-doctor").exists()
        lines = result.stderr.splitlines()
        said = next(line for line in lines if "Error: " in line).partition(": ")[2]
        assert lines[-1] == f"Error: TARGET: {module}:f: importing {module} " + message.format(said)
        frames = [line for line in lines if line.startswith("  File ")]
        assert first in frames[0] and "auxhead" not in "".join(frames)


def test_what_a_factory_or_a_request_raises(folder):
    for name, message, first in (
        ("factory", "errs_mod:factory raised ValueError: my model needs weights (errs_mod.py:5)", "in factory"),
        ("silent", "errs_mod:silent raised KeyError (errs_mod.py:8)", "in silent"),
        ("of_auxhead", "errs_mod:of_auxhead raised BadInput: ", "in of_auxhead"),
        ("leaves", "errs_mod:leaves raised SystemExit: 3 (errs_mod.py:15)", None),
        ("forward_fails", "errs_mod:forward_fails: a request raised RuntimeError: ", "in forward"),
        ("input_does_not_fit", "errs_mod:input_does_not_fit: a request raised RuntimeError: ", "torch"),
    ):
        with pytest.raises(UserCodeError) as raised:
            find_target(f"errs_mod:{name}")(torch.device("cpu")).request()
        assert str(raised.value).startswith(f"TARGET: {message}") and "\n" not in str(raised.value)
        frames = [line for line in raised.value.shown.splitlines() if line.startswith("  File ")]
        assert (first is None and not frames) or first in frames[0]
        if name == "forward_fails":
            assert str(raised.value).endswith("(errs_mod.py:22)")


def test_a_factory_that_takes_arguments(folder):
    message = "TARGET: errs_mod:takes takes arguments (size, *, more=1), wants a function without any"
    assert_one_line_error(tune("doctor", "errs_mod:takes"), message)
    assert find_target("errs_mod:may_take")(torch.device("cpu")).request().shape == (1, 1)


def test_what_a_script_raises(folder, monkeypatch):
    """A script named like a module of Python's is the user's all the same."""
    monkeypatch.setattr(script, "profiler", contextlib.nullcontext)
    for source, message in (
        ("def main():\n    open('no_data.csv')\nmain()", "raised FileNotFoundError: [Errno 2] No such file or dir"),
        ("import sys\nsys.exit('no data')", "raised SystemExit: no data (random.py:2)"),
        ("x = (", "raised SyntaxError: "),
    ):
        (folder / "random.py").write_text(source)
        for file in (folder / "random.py", Path("random.py")):
            with pytest.raises(UserCodeError) as raised:
                script.profile_script(file, (), folder / "trace.json")
            assert str(raised.value).startswith(f"SCRIPT: {file} {message}")
            assert raised.value.shown.count("runpy") == 0 and str(raised.value).endswith(")")


def test_errors_of_our_own_checks_have_no_traceback(folder):
    with pytest.raises(BadInput) as raised:
        find_target("errs_mod:nothing")
    assert type(raised.value) is BadInput
