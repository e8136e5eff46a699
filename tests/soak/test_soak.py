"""The soak run's own eyes: a wrong answer is told with its request, a changed canary is counted, growth is seen."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from auxhead.model import ExitResult
from support import stream_order
from support.soak_beside import Beside
from support.soak_client import THOUSAND, Client
from support.soak_table import NOTHING, Table
from support.stream_order import Stream
from torch import Tensor

CPU = torch.device("cpu")
CLASSES = 3


@pytest.fixture(autouse=True)
def streams_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stream_order.patched(monkeypatch)
    monkeypatch.setattr("support.soak_beside._MOST_ELEMENTS", 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


class Ruled:
    """Answers from its input and its rules alone, as a network does."""

    def __init__(self) -> None:
        self.rules = 0

    def set_rules(self, rules: int) -> None:
        self.rules = rules

    def __call__(self, x: Tensor) -> ExitResult:
        probs = torch.softmax(x + 0.1 * self.rules, 1)
        return ExitResult(x.argmax(1), probs.amax(1), probs, (x.argmax(1) + self.rules) % 4)


class Words(int):
    """Rules that are a number."""

    def items(self) -> list[tuple[str, "Words"]]:
        return [("all", self)]

    def extra_repr(self) -> str:
        return f"number {int(self)}"


def client_of(run: Callable[[Tensor], ExitResult], network: Ruled) -> tuple[Client, dict[str, object], Beside]:
    inputs = [torch.randn(size, CLASSES) for size in (1, 2, 5, 3)]
    table = Table.of(network, "as_is", inputs, [Words(number) for number in range(3)], network)
    client = Client("a client", table, CPU, seed=0)
    return client, {"right": network, "suspect": run}, Beside(CPU, [Stream(), Stream()], Random(0))


def asked(run: Callable[[Tensor], ExitResult], network: Ruled, count: int = 300) -> tuple[list[str], int]:
    client, runners, beside = client_of(run, network)
    alarms = client.ask(runners, [Stream(), Stream()], beside, count, alone=True)
    return alarms, client.requests


def changing(
    network: Ruled, change: Callable[[ExitResult], ExitResult], at: int = 40
) -> Callable[[Tensor], ExitResult]:
    """A runner one of whose answers is changed."""
    answers = 0

    def run(x: Tensor) -> ExitResult:
        nonlocal answers
        answers += 1
        return change(network(x)) if answers == at else network(x)

    return run


def test_right_answers_raise_no_alarm() -> None:
    network = Ruled()
    assert asked(network, network) == ([], 300)


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer._replace(label=answer.label + 1),
        lambda answer: answer._replace(exit_index=answer.exit_index + 1),
        lambda answer: answer._replace(confidence=answer.confidence + 0.01),
        lambda answer: answer._replace(probs=answer.probs * float("nan")),
        lambda answer: answer._replace(label=torch.full_like(answer.label, NOTHING)),
    ],
    ids=["label", "exit", "confidence", "NaN", "nothing written"],
)
def test_one_wrong_answer_is_told_with_its_runner_batch_and_rules(change: Callable[[ExitResult], ExitResult]) -> None:
    network = Ruled()
    alarms, _ = asked(changing(network, change), network)
    assert len(alarms) == 2 and "1 of 300 answers differ" in alarms[0]
    assert "to 'suspect': batch of " in alarms[1] and "(all: number " in alarms[1]


def test_an_answer_under_other_rules_than_those_assigned_is_wrong() -> None:
    network = Ruled()

    def forgets(x: Tensor) -> ExitResult:
        rules, network.rules = network.rules, 0
        answer = network(x)
        network.rules = rules
        return answer

    alarms, _ = asked(forgets, network)
    assert alarms and "rules 0" not in "".join(alarms)


def test_an_answer_that_changes_after_it_was_given_is_wrong() -> None:
    network = Ruled()
    first: list[ExitResult] = []

    def run(x: Tensor) -> ExitResult:
        answer = network(x)
        first.append(answer)
        if len(first) > 100:
            first[len(first) - 100].label.fill_(CLASSES)
        return answer

    alarms, _ = asked(run, network, THOUSAND)
    assert alarms and alarms[0].endswith("kept by the caller until now; first of all")


def test_a_canary_that_was_written_to_is_counted() -> None:
    beside = Beside(CPU, [Stream(), Stream()], Random(0))
    canaries = [beside.add(elements, where) for elements, where in ((100, 0), (7, 1), (1, 0))]
    canaries[1][3:5] = 0
    canaries[2] += 1
    beside.check(1)
    assert beside.changed() == 2
    beside.check_all()
    assert beside.changed() == 3


def test_others_work_changes_no_canary() -> None:
    beside = Beside(CPU, [Stream(), Stream()], Random(0))
    for _ in range(300):
        beside.step(clears_workspaces=True)
    beside.check_all()
    assert beside.changed() == 0


def test_memory_that_grows_is_told_from_memory_that_wavers() -> None:
    spec = importlib.util.spec_from_file_location("soak", Path(__file__).with_name("soak.py"))
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    assert soak.growth([0, 900, 900, 900] + [10, 12, 9, 11] * 5) == -3
    assert soak.growth([0, 900, 900, 900] + [10 + turn for turn in range(20)]) == 13
    assert soak.growth([0] * 11) is None
