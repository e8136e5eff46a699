"""Every command that a document shows is one that its program takes: names, options, values."""

import importlib
import re
import shlex
from functools import cache
from typing import NamedTuple

import pytest
import typer
from auxhead.autotune.measuring.options import check_own
from auxhead.model.training.plan import TrainingPlan
from support.documents import ROOT, documents, name_of, text_of, without_fences
from typer.testing import CliRunner

PACKAGES = {"auxhead": "model", "auxhead-tune": "autotune", "auxhead-plot": "plots"}
#: How a command begins, at the start of a line of code or of a span of it.
COMMAND = re.compile(r"(?:\.venv/bin/)?(?:python -m auxhead\.(model|autotune|plots)|(auxhead(?:-tune|-plot)?))(?= |$)")
#: A figure that is there once the patch of the guide on adding is applied; test_adding.py runs it then.
OF_PATCHES = "auxhead-plot trunks "
#: Commands that measure a network which a function returns, with all that the network says itself.
OF_YOUR_OWN = re.compile(r"auxhead-tune (overlap|heads|sweep|bench) .*:\w")


class Shown(NamedTuple):
    """A command in a document."""

    where: str
    text: str
    whole: bool
    """It stands on a line of its own, to be typed as it is; in a sentence arguments may be left out."""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


def shown() -> list[Shown]:
    """All commands of all documents but the changelog, which may name those that are no more."""
    found = []
    for document in documents():
        if document.name == "CHANGELOG.md":
            continue
        text = text_of(document)
        for number, line in enumerate(text.splitlines(), start=1):
            code = line.strip().removeprefix("$ ") if line.startswith(("    ", "auxhead", ".venv", "$ ")) else ""
            if COMMAND.match(code) and OF_PATCHES not in code:
                found.append(Shown(f"{name_of(document)}:{number}", code, True))
        for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", without_fences(text)):
            code = " ".join(span[1].split())
            if COMMAND.match(code):
                number = text[: span.start()].count("\n") + 1
                found.append(Shown(f"{name_of(document)}:{number}", code, False))
    return found


@cache
def program(name):
    return typer.main.get_command(importlib.import_module(f"auxhead.{PACKAGES[name]}.__main__").app)


def name_of_program(command: Shown) -> str:
    began = COMMAND.match(command.text)
    return began[2] or next(name for name, package in PACKAGES.items() if package == began[1])


def parse(command: Shown) -> typer.Context | None:
    """Parse it as its program would, without running it; None of one that names a command alone, or only prints."""
    name = name_of_program(command)
    words = shlex.split(command.text[COMMAND.match(command.text).end() :], comments=True)
    chosen = program(name)
    if words and not words[0].startswith("-"):
        assert words[0] in chosen.commands, f"{name} has no command {words[0]!r}"
        chosen = chosen.commands[words.pop(0)]
    if not words and not command.whole:
        return None  # a sentence that names the command
    try:
        return chosen.make_context(name, words)
    except typer.Exit:  # --help and --version have printed
        return None


@pytest.mark.parametrize("name", PACKAGES)
def test_commands_parse(name: str, capsys):
    found = [one for one in shown() if name_of_program(one) == name]
    assert found
    for command in found:
        try:
            parse(command)
        except BaseException as error:
            raise AssertionError(f"{command}: {capsys.readouterr().err}") from error


class Checked(Exception):
    """Options were checked; here a command would begin to measure."""


@pytest.fixture
def checks_alone(monkeypatch):
    """Let commands that measure a network of the user's own end once they have checked the options beside it."""

    def check(model, chosen):
        check_own(model, chosen)
        raise Checked

    for module in ("measuring.options", "bench.command"):
        monkeypatch.setattr(f"auxhead.autotune.{module}.check_own", check)


@pytest.mark.parametrize("command", [one for one in shown() if OF_YOUR_OWN.search(one.text)], ids=str)
def test_options_fit_a_network_of_your_own(command: Shown, checks_alone):
    """The batch, say, is that which the function returns: it is parsed, and refused after that."""
    context = parse(command)
    with pytest.raises(Checked):
        context.command.invoke(context)


def test_a_command_or_an_option_that_does_not_fit_is_found(checks_alone):
    context = parse(Shown("here", "auxhead-tune overlap mypackage.mymodel:factory --batch 8", True))
    with pytest.raises(typer.Exit):
        context.command.invoke(context)
    for text in ("auxhead-tune nosuch", "auxhead demo --nosuch", "auxhead-tune sweep resnet18 --dtype most"):
        with pytest.raises((AssertionError, Exception), match="nosuch|most"):
            parse(Shown("here", text, True))


def test_make_has_the_targets_that_documents_name():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for document in set(documents()) - {ROOT / "CHANGELOG.md"}:  # which names those that are no more
        for target in re.findall(r"^    make ([a-z-]+)|`make ([a-z-]+)", text_of(document), flags=re.MULTILINE):
            assert set(target) - {""} <= targets, f"{name_of(document)}: make {''.join(target)}"


def test_python_versions_are_those_of_the_makefile():
    (versions,) = re.findall(r"PYTHON is any (3\.\d+ to 3\.\d+)", (ROOT / "Makefile").read_text())
    assert f"with Python {versions}" in (ROOT / "README.md").read_text()


def test_defaults_in_words_are_shown():
    shown = CliRunner().invoke(importlib.import_module("auxhead.model.__main__").app, ["demo", "--help"]).output
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown).split())
    assert f"[default: ({TrainingPlan.epochs}, more for few images)]" in words
    assert "[default: (16 for the digits, else 32)]" in words
