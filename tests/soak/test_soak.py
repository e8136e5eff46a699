"""The soak run's own eyes: a wrong answer is told with its request, a changed canary is counted, growth is seen."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from auxhead.model import ExitResult
from soak import soak
from support import stream_order
from support.stream_order import Stream
from torch import Tensor

CPU = torch.device("cpu")
CLASSES = 3


@pytest.fixture(autouse=True)
def streams_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stream_order.patched(monkeypatch)
    monkeypatch.setattr(soak, "_MOST_ELEMENTS", 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)


class Ruled:
    """Answers from its input and its rules alone, as a network does."""

    rules = 0

    def set_rules(self, rules: int) -> None:
        self.rules = rules

    def __call__(self, x: Tensor) -> ExitResult:
        probs = torch.softmax(x + 0.1 * self.rules, 1)
        return ExitResult(x.argmax(1), probs.amax(1), probs, (x.argmax(1) + self.rules) % 4)


def asked(run: Callable[[Tensor], ExitResult], network: Ruled, count: int = 300) -> list[str]:
    inputs = [torch.randn(size, CLASSES) for size in (1, 2, 5, 3)]
    case = soak.Case(network, "as_is", inputs, [0, 1, 2], soak.answers_of(network, inputs, [0, 1, 2], network))
    beside = soak.Beside(CPU, [Stream(), Stream()], Random(0))
    return soak.Client(case, CPU, seed=0).ask({"right": network, "suspect": run}, [Stream(), Stream()], beside, count)


def test_right_answers_raise_no_alarm() -> None:
    network = Ruled()
    assert asked(network, network) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer._replace(label=answer.label + 1),
        lambda answer: answer._replace(exit_index=answer.exit_index + 1),
        lambda answer: answer._replace(confidence=answer.confidence + 0.01),
        lambda answer: answer._replace(probs=answer.probs * float("nan")),
    ],
    ids=["label", "exit", "confidence", "NaN"],
)
def test_one_wrong_answer_is_told_with_its_request(change: Callable) -> None:
    network, answers = Ruled(), iter(range(300))
    first, *alarms = asked(lambda x: change(network(x)) if next(answers) == 40 else network(x), network)
    assert first.startswith("1 of 300 answers differ") and len(alarms) <= 2
    assert alarms[0].startswith("to 'suspect': batch of ") and "rules " in alarms[0]


def test_an_answer_under_other_rules_than_those_assigned_is_wrong() -> None:
    network = Ruled()

    def forgets(x: Tensor) -> ExitResult:
        rules, network.rules = network.rules, 0
        answer = network(x)
        network.rules = rules
        return answer

    alarms = asked(forgets, network)
    assert alarms and "rules 0" not in "".join(alarms)


def test_an_answer_that_changes_after_it_was_given_is_wrong() -> None:
    network, given = Ruled(), list[ExitResult]()

    def run(x: Tensor) -> ExitResult:
        given.append(network(x))
        if len(given) > 100:
            given[-100].label.fill_(CLASSES)
        return given[-1]

    alarms = asked(run, network, soak.THOUSAND)
    assert alarms and all(alarm.endswith("kept by the caller until now") for alarm in alarms[1:])


def test_a_canary_that_was_written_to_is_counted_and_others_work_changes_none() -> None:
    beside = soak.Beside(CPU, [Stream(), Stream()], Random(0))
    for _ in range(300):
        beside.step(clears_workspaces=True)
    assert beside.changed() == 0
    canaries = [beside.add(elements, where) for elements, where in ((100, 0), (7, 1), (1, 0))]
    canaries[1][3:5] = 0
    canaries[2] += 1
    assert beside.changed() == 3


def test_memory_that_grows_is_told_from_memory_that_wavers() -> None:
    assert soak.growth([0, 900, 900, 900] + [10, 12, 9, 11] * 5) == -3
    assert soak.growth([0, 900, 900, 900] + [10 + turn for turn in range(20)]) == 13
    assert soak.growth([0] * 11) is None
