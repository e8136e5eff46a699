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
SHOW_HELP = f"""
import sys, importlib, typer
app = importlib.import_module(f"auxhead.{{sys.argv[1]}}.__main__").app
for command in ["", *typer.main.get_command(app).commands]:
    try:
        app([command, "--help"] if command else ["--help"])
    except SystemExit as left:
        assert not left.code, command
    heavy = sorted(set({HEAVY}) & set(sys.modules))
    assert not heavy, f"{{command}} imports {{heavy}}"
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = [sys.executable, *arguments]
    return subprocess.run(done, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}, cwd="/")


@pytest.mark.parametrize("package", COMMANDS)
def test_help_of_every_command_needs_nothing_that_takes_seconds_to_import(package: str) -> None:
    done = run("-c", SHOW_HELP, package)
    assert done.returncode == 0, done.stderr
    commands = typer.main.get_command(importlib.import_module(f"auxhead.{package}.__main__").app).commands
    assert done.stdout.count("Usage: ") == 1 + len(commands)


@pytest.mark.parametrize("package", COMMANDS)
def test_the_version_and_the_name_of_a_package_that_is_run(package: str) -> None:
    said = run("-m", f"auxhead.{package}", "--version")
    assert (said.returncode, said.stdout, said.stderr) == (0, f"auxhead {version('auxhead')}\n", "")
    assert f"Usage: python -m auxhead.{package} [OPTIONS] COMMAND" in run("-m", f"auxhead.{package}", "--help").stdout
    unknown = run("-m", f"auxhead.{package}", "nosuch")
    assert unknown.returncode == 2 and f"Try 'python -m auxhead.{package} --help'" in unknown.stderr


def test_the_installed_commands_say_their_names() -> None:
    for name in COMMANDS.values():
        path = os.path.join(os.path.dirname(sys.executable), name)
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
        assert done.stdout == f"auxhead {version('auxhead')}\n", done.stderr
        shown = subprocess.run([path], capture_output=True, text=True)
        assert f"Usage: {name} [OPTIONS] COMMAND" in shown.stdout + shown.stderr


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
