"""Fused heads alone beside their peers, and the floor of their bytes."""

import importlib
from collections import Counter

import pytest
import torch
from auxhead.autotune.measuring.failures import Failure
from auxhead.autotune.measuring.peers import NaiveHead
from auxhead.autotune.records.comparison import Paired
from auxhead.model import ExitRule, FusedAuxHead

alone_head = importlib.import_module("auxhead.autotune.measuring.heads_alone")
head_timing = importlib.import_module("auxhead.autotune.measuring.head_timing")


def test_a_head_is_measured_against_its_peers(timing, timed_by, monkeypatch):
    target, head = next(iter(timing.heads.items()))
    checked, begun, compiled = [], [], []
    wrong_answer = alone_head.AloneHead.wrong_answer

    def spy(self, said, *, peer=False):
        checked.append(peer)
        return wrong_answer(self, said, peer=peer)

    def compile(module, mode, dynamic):
        compiled.append((mode, dynamic))
        return module

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(alone_head.AloneHead, "wrong_answer", spy)
    timed_by(timed_by_name)
    found = timing.against_peers(target, 3, 2, begun.append)
    assert sorted(begun) == sorted(found) and list(found) == ["fused", "eager", "compiled"]
    assert compiled == [("max-autotune-no-cudagraphs", False)]
    assert Counter(checked) == {False: 2 + 2, True: 2 + 2}, "beside other work, and every capture"
    for variant, us in (("fused", 2.5), ("eager", 2.5), ("compiled", 4.0)):  # half of the letters: a chain is of two
        assert found[variant].own == [[us] * 3] * 2 and found[variant].baseline == [[2.5] * 3] * 2
    assert len({result.run for result in found.values()}) == 1
    assert head.chosen == target.rule
    # [1, 12, 4, 4], 5 classes: the map, the weight and the bias in float32; probabilities, label, confidence and exit
    assert head.bytes_moved == 4 * (12 * 16 + 5 * 12 + 5) + 4 * 5 + 8 + 4 + 1


def test_a_head_of_no_network_is_measured_against_some_peers(simulated, timed_by):
    alone = alone_head.AloneHead(FusedAuxHead(12, 5).eval(), torch.randn(2, 12, 4, 4))
    target = alone_head.Target(alone.shape, "none", ("mine",))
    timing = head_timing.HeadTiming(torch.device("cpu"), {target: alone})
    assert timing.targets == [target] and timing.prepare(target, [target.rule]) == {}
    timed_by(timed_by_name)
    found = timing.against_peers(target, 3, 2, lambda _variant: None, ("fused", "eager"), launches=1)
    assert list(found) == ["fused", "eager"] and found["fused"].own == [[5.0] * 3] * 2, "a chain of one"


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_right_answer_is_one_at_the_heads_temperature(temperature, without_interpreter):
    head = FusedAuxHead(12, 5, rule=ExitRule(0.5, temperature=temperature)).eval()
    x = torch.randn(3, 12, 4, 4)
    alone = alone_head.AloneHead(head, x)
    with torch.no_grad():
        assert alone.wrong_answer(head(x)) is None
        head.rule.temperature = 1.0
        assert "probabilities are off" in alone.wrong_answer(head(x))


def timed_by_name(variants, device, *, rounds, repeat):
    """A replay takes as many microseconds as its name has letters."""
    for captures in variants.values():
        for call in captures:
            call()
    return {name: [[float(len(name))] * rounds for _ in captures] for name, captures in variants.items()}


def test_a_peer_that_answers_wrongly_is_not_timed(timing, monkeypatch):
    eager = NaiveHead.forward

    def off(self, x):
        said = eager(self, x)
        return said._replace(confidence=said.confidence - 0.01)

    monkeypatch.setattr(NaiveHead, "forward", off)
    found = timing.against_peers(timing.targets[0], 2, 2, lambda _variant: None)
    assert isinstance(found["fused"], Paired)
    for variant in ("eager", "compiled"):
        assert found[variant].kind == "wrong answer" and "probabilities are off by 0.01" in found[variant].detail


def test_a_peer_that_fails_is_a_failure_and_the_rest_is_timed(timing, monkeypatch):
    def failing(*_, **__):
        raise RuntimeError("no kernel\n was found")

    monkeypatch.setattr(torch, "compile", failing)
    found = timing.against_peers(timing.targets[0], 2, 2, lambda _variant: None)
    assert found["compiled"] == Failure("RuntimeError", "no kernel was found")
    assert isinstance(found["fused"], Paired) and isinstance(found["eager"], Paired)

    monkeypatch.setattr(alone_head.AloneHead, "launch", failing)
    found = timing.against_peers(timing.targets[0], 2, 2, lambda _variant: None)
    assert found["fused"] == Failure("RuntimeError", "no kernel was found")
    assert found["eager"] == Failure("no baseline", "the fused head failed")


def test_a_floor_is_that_of_copies(simulated, monkeypatch):
    monkeypatch.setattr(head_timing, "COPIED", 64)
    copies = head_timing.time_copies(torch.device("cpu"), 3)  # four copies take a simulated millisecond
    assert copies == [[250.0] * 3] and head_timing.floor_of(32, copies) == [[62.5] * 3]
    other = [[100.0, 200.0]]  # of COPIED bytes read and as many written
    assert head_timing.floor_of(128, other) == other and head_timing.floor_of(16, other) == [[12.5, 25.0]]
