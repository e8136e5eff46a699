"""Help texts of the commands: Rich shows all of them, and their defaults."""

import importlib
import re

import pytest
import typer
from auxhead.model.training.plan import TrainingPlan
from typer.testing import CliRunner


@pytest.mark.parametrize("command", ["model", "autotune", "plots"])
def test_no_help_text_holds_what_rich_takes_for_markup(command):
    """It would be left out: defaults in words go to ``show_default``."""
    app = importlib.import_module(f"auxhead.{command}.__main__").app
    for name, subcommand in typer.main.get_command(app).commands.items():
        for option in subcommand.params:
            assert "[" not in (getattr(option, "help", None) or ""), f"{name} {option.name}: {option.help}"


def test_defaults_in_words_are_shown():
    shown = CliRunner().invoke(importlib.import_module("auxhead.model.__main__").app, ["demo", "--help"]).output
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())
    assert f"[default: ({TrainingPlan.epochs}, more for few images)]" in words
    assert "[default: (16 for the digits, else 32)]" in words
