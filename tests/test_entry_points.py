"""The three commands from outside: help and version without what takes seconds to import, and alike."""

import importlib
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import typer

COMMANDS = {"model": "auxhead", "autotune": "auxhead-tune", "plots": "auxhead-plot"}
#: Packages that take long to import, or need not be there for help.
HEAVY = ("torch", "triton", "cuda", "torchvision", "safetensors", "sklearn", "PIL", "matplotlib", "numpy")
SHOW = f"""
import sys, importlib, typer
app = importlib.import_module(f"auxhead.{{sys.argv[1]}}.__main__").app
for words in [["--version"], ["--help"], *([name, "--help"] for name in typer.main.get_command(app).commands)]:
    try:
        app(words)
    except SystemExit as left:
        assert not left.code, words
    heavy = sorted(set({HEAVY}) & set(sys.modules))
    assert not heavy, f"{{words}} imports {{heavy}}"
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, cwd="/")


@pytest.mark.parametrize("package", COMMANDS)
def test_help_and_version_need_nothing_that_takes_seconds_and_programs_say_their_names(package: str) -> None:
    done = run(sys.executable, "-c", SHOW, package)
    assert done.returncode == 0, done.stderr
    commands = typer.main.get_command(importlib.import_module(f"auxhead.{package}.__main__").app).commands
    assert done.stdout.startswith(f"auxhead {version('auxhead')}\n")
    assert done.stdout.count("Usage: ") == 1 + len(commands)
    installed = os.path.join(os.path.dirname(sys.executable), COMMANDS[package])
    module = f"python -m auxhead.{package}"
    for command, name in (((installed,), COMMANDS[package]), ((sys.executable, "-m", f"auxhead.{package}"), module)):
        unknown = run(*command, "nosuch")
        assert unknown.returncode == 2 and f"Usage: {name} [OPTIONS] COMMAND" in unknown.stderr
        assert f"Try '{name} --help'" in unknown.stderr


def test_the_report_needs_torch_alone() -> None:
    beside = {*HEAVY} - {"numpy"}  # which PyTorch imports
    code = (
        "import sys\nfrom auxhead.model.__main__ import app\ntry: app(['--report'])\n"
        f"except SystemExit as left: print(left.code, sorted({beside} & {{*sys.modules}}))"
    )
    done = run(sys.executable, "-c", code)
    assert done.stdout.startswith(f"auxhead      {version('auxhead')}\ntorch "), done.stderr
    assert done.stdout.endswith("0 ['torch']\n")


def test_the_three_are_alike() -> None:
    apps = [importlib.import_module(f"auxhead.{package}.__main__").app for package in COMMANDS]
    settings = [
        (app.pretty_exceptions_enable, app._add_completion, app.info.no_args_is_help, app.info.callback) for app in apps
    ]
    assert settings == [settings[0]] * 3 and settings[0][:3] == (False, False, True)
    for app in apps:
        for name, command in typer.main.get_command(app).commands.items():
            for option in command.params:
                said = getattr(option, "help", None)
                assert said and said.endswith(".") and "(default" not in said, f"{name} {option.name}: {said}"
                assert "[" not in said, f"{name} {option.name}: Rich takes it for markup, and leaves it out"
            assert command.help and command.help.split("\n")[0].endswith((".", "?")), name
