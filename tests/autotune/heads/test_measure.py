"""The measurer of a GPU, on a machine without one: what it does around its kernels, which are interpreted."""

import importlib
import os
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.measuring.failures import DeviceLost, Failure
from auxhead.autotune.measuring.timers import VariantFailed, time_rounds
from auxhead.autotune.records.comparison import Paired
from auxhead.autotune.sweep.space import neighbours
from auxhead.kernels import HeadOutput
from auxhead.model import FusedAuxHead

alone_head = importlib.import_module("auxhead.autotune.measuring.heads_alone")
head_timing = importlib.import_module("auxhead.autotune.measuring.head_timing")


def called_once(variants, device, *, rounds, repeat):
    for captures in variants.values():
        for call in captures:
            call()
    return {name: [[1.0] * rounds for _ in captures] for name, captures in variants.items()}


def test_the_heads_of_a_network_are_measured(timing, timed_by):
    targets = timing.targets
    assert [target.taps for target in targets] == [("block1",), ("block2",)]
    assert [target.shape.channels for target in targets] == [12, 16] and targets[0].shape.layout == "contiguous"
    assert targets[0].model == "tests:small"
    target = targets[0]
    other = neighbours(target.rule, target.shape)[0]
    configs = [target.rule, other]
    timed_by(called_once)
    assert timing.prepare(target, configs) == {}
    found = timing.time(target, configs, 3, 2)
    assert list(found) == configs and all(isinstance(result, Paired) for result in found.values())
    (rule, tried) = found.values()
    assert rule.own == rule.baseline == tried.baseline and rule.run == tried.run != ""
    assert [len(rounds) for rounds in tried.own] == [3, 3] and timing.protocol["place"] == "alone"


def test_variants_are_captured_in_turns(timing, timed_by, monkeypatch):
    """Lest where memory happens to lie, or a drift, is taken for a difference between them."""
    target, captured = timing.targets[0], []
    configs = [target.rule, *neighbours(target.rule, target.shape)[:3]]
    chain = alone_head.AloneHead.chain
    monkeypatch.setattr(alone_head.AloneHead, "chain", lambda self, one: captured.append(one) or chain(self, one))

    def timed(variants, device, *, rounds, repeat):
        return {name: [[1.0] * rounds] * len(captures) for name, captures in variants.items()}

    timed_by(timed)
    assert set(timing.time(target, configs, 3, 4)) == set(configs)
    turns = [tuple(captured[start : start + 4]) for start in range(0, 16, 4)]
    assert all(set(turn) == set(configs) for turn in turns) and len(captured) == 16
    assert len(set(turns)) > 1, "in another order"


def test_wrong_answers_are_not_timed(timing, monkeypatch):
    target = timing.targets[0]
    launch = alone_head.AloneHead.launch

    def off(self, config):
        out = launch(self, config)
        return out if config == target.rule else HeadOutput(out.probs + 0.01, out.label, out.confidence, out.exit)

    monkeypatch.setattr(alone_head.AloneHead, "launch", off)
    other = neighbours(target.rule, target.shape)[0]
    failures = timing.prepare(target, [target.rule, other])
    assert list(failures) == [other] and failures[other].kind == "wrong answer"
    assert "probabilities are off by 0.01" in failures[other].detail


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, _turn: out._replace(label=(out.label + 1) % 5), "a label is not that of the largest probability"),
        (lambda out, turn: out._replace(confidence=out.confidence + 1e-7 * turn), "two launches on the same"),
        (lambda out, _turn: out._replace(confidence=out.confidence * float("nan")), "probabilities are off by nan"),
    ],
)  # fmt: skip
def test_what_is_wrong(change, message, timing, monkeypatch):
    head, turns = next(iter(timing.heads.values())), iter(range(100))
    launch = alone_head.AloneHead.launch
    monkeypatch.setattr(alone_head.AloneHead, "launch", lambda self, config: change(launch(self, config), next(turns)))
    assert message in head.wrong(timing.targets[0].rule)


def test_a_peer_may_be_less_exact(timing):
    """torch.compile's kernels add one product after another."""
    head, target = next(iter(timing.heads.values())), timing.targets[0]
    with torch.no_grad():
        ours = head.launch(target.rule)
    ours = ours._replace(probs=None, confidence=ours.confidence + 1.5e-6)
    assert "probabilities are off by 1.5e-06, 4.8e-07 being allowed" in head.wrong_answer(ours)
    peer = HeadOutput(None, ours.label, ours.confidence, ours.exit)
    assert head.wrong_answer(peer, peer=True) is None
    wrong = head.wrong_answer(peer._replace(confidence=peer.confidence + 1e-5), peer=True)
    assert "1.9e-06 being allowed" in wrong
    half = FusedAuxHead(16, num_classes=5).half()
    said = half(x := torch.randn(3, 16).half())
    off = HeadOutput(None, said.label, said.confidence.half() + 0.02, said.exit)
    assert "0.0039 being allowed" in alone_head.AloneHead(half, x).wrong_answer(off)


def test_lucky_logits_of_pytorch_in_float16_do_not_make_sums_in_float32_wrong():
    """Of one sample and two classes PyTorch's rounding may be next to nothing."""
    head = FusedAuxHead(16, num_classes=2).half()
    torch.nn.init.zeros_(head.linear.weight)
    torch.nn.init.zeros_(head.linear.bias)
    said = head(x := torch.randn(1, 16).half())
    alone = alone_head.AloneHead(head, x)
    assert alone.wrong_answer(said._replace(confidence=said.confidence + 1.1e-6)) is None
    assert "7.6e-06 being allowed" in alone.wrong_answer(said._replace(confidence=said.confidence + 3e-5))


def test_nor_lucky_ones_of_large_logits_others_that_are_rounded_as_they_are():
    """PyTorch's largest logit, 8, loses nothing to bfloat16; that of others may lose half of a rounding, 1/64."""
    head = FusedAuxHead(16, num_classes=2).bfloat16()
    torch.nn.init.zeros_(head.linear.weight)
    with torch.no_grad():
        head.linear.bias.copy_(torch.tensor([8.0, 7.0]))
    said = head(x := torch.randn(1, 16).bfloat16())
    alone = alone_head.AloneHead(head, x)
    rounded = torch.tensor([[8 + 1 / 64, 7.0]]).softmax(1)
    assert alone.wrong_answer(said._replace(probs=rounded, confidence=rounded[:, 0])) is None
    twice_too_far = torch.tensor([[8 + 1 / 8, 7.0]]).softmax(1)
    wrong = alone.wrong_answer(said._replace(probs=twice_too_far, confidence=twice_too_far[:, 0]))
    assert wrong == "probabilities are off by 0.024, 0.012 being allowed"


def test_nor_a_sample_of_small_logits_whose_features_are_rounded_as_those_of_others_are():
    """Many features that cancel out in one sample are off as much as in another."""
    head = FusedAuxHead(1, num_classes=2, pool="none").bfloat16()
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[1.0], [0.0]]))
        head.linear.bias.zero_()
    said = head(x := torch.tensor([[8.0], [0.25]]).bfloat16())
    alone = alone_head.AloneHead(head, x)
    rounded = torch.tensor([[8.0, 0.0], [0.25 + 1 / 64, 0.0]]).softmax(1)
    assert alone.wrong_answer(said._replace(probs=rounded, confidence=rounded[:, 0])) is None
    far = torch.tensor([[8.0, 0.0], [0.25 + 1 / 8, 0.0]]).softmax(1)
    wrong = alone.wrong_answer(said._replace(probs=far, confidence=far[:, 0]))
    assert wrong == "probabilities are off by 0.03, 0.015 being allowed"


def test_nor_answers_that_are_twice_as_far_off_as_pytorchs_logits(monkeypatch):
    """Those of a class that has no probability are off, so that none of PyTorch's probabilities is."""
    head = FusedAuxHead(16, num_classes=3)
    torch.nn.init.zeros_(head.linear.weight)
    with torch.no_grad():
        head.linear.bias.copy_(torch.tensor([0.0, 0.0, -50.0]))
    said = head(x := torch.randn(1, 16))
    monkeypatch.setattr(head, "logits", lambda x: head.linear(x) + torch.tensor([0.0, 0.0, 1e-4]))
    alone = alone_head.AloneHead(head, x)
    assert alone.wrong_answer(said._replace(confidence=said.confidence + 4e-5)) is None
    assert "5e-05 being allowed" in alone.wrong_answer(said._replace(confidence=said.confidence + 6e-5))


def test_probabilities_of_other_classes_are_wrong_however_small_they_are():
    """Of thousands of classes none is larger than what a rounding of bfloat16 may do to one of two."""
    head = FusedAuxHead(16, num_classes=21843).bfloat16()
    with torch.no_grad():
        head.linear.weight.mul_(0.25)
    said = head(x := torch.randn(3, 16).bfloat16())
    alone = alone_head.AloneHead(head, x)
    assert alone.wrong_answer(said) is None
    assert "probabilities are off by" in alone.wrong_answer(said._replace(probs=said.probs.roll(1, 1)))
    half = said.confidence / 2
    assert "probabilities are off by" in alone.wrong_answer(said._replace(probs=None, confidence=half))


def test_what_raises_is_a_failure_and_the_rest_is_timed(timing, timed_by, monkeypatch):
    target = timing.targets[0]
    rule, bad, worse = target.rule, *neighbours(target.rule, target.shape)[:2]
    launch = alone_head.AloneHead.launch

    def raising(self, config):
        if config == bad:
            raise RuntimeError("out of resource:\n  shared memory")
        return launch(self, config)

    monkeypatch.setattr(alone_head.AloneHead, "launch", raising)
    reason = Failure("RuntimeError", "out of resource: shared memory")
    assert timing.prepare(target, [rule, bad, worse]) == {bad: reason}
    chains = timing.time(target, [rule, bad, worse], 1, 1)
    assert chains[bad] == reason and isinstance(chains[worse], Paired)

    def failing(variants, device, *, rounds, repeat):
        if worse in variants:
            raise VariantFailed(worse) from RuntimeError("launch failed")
        return time_rounds(variants, device, rounds=rounds, repeat=repeat)

    timed_by(failing)
    found = timing.time(target, [rule, worse], 1, 1)
    assert found[worse] == Failure("RuntimeError", "launch failed") and isinstance(found[rule], Paired)


def test_a_lost_device_ends_the_sweep_after_its_failure_is_told(timing, monkeypatch):
    target = timing.targets[0]

    def lost(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(alone_head.AloneHead, "wrong", lost)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        timing.prepare(target, [target.rule, target.rule])
    with pytest.raises(DeviceLost):
        timing.time(target, [target.rule], 1, 1)


def test_waiting_for_a_launch_comes_to_an_end(monkeypatch):
    answers = iter([False, False, True])
    assert head_timing._ends(SimpleNamespace(query=lambda: next(answers)))
    monkeypatch.setattr(head_timing, "ENDS_S", 0.01)
    assert not head_timing._ends(SimpleNamespace(query=lambda: False))


def test_a_launch_that_does_not_end_is_told_and_nothing_waits_for_it(timing, monkeypatch):
    target = timing.targets[0]
    rule, endless, other = target.rule, *neighbours(target.rule, target.shape)[:2]
    ends, at_exit = iter([True, False, True]), []
    monkeypatch.setattr(head_timing, "_ends", lambda stream: next(ends))
    monkeypatch.setattr(head_timing.atexit, "register", at_exit.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the device"))
    failed = timing.prepare(target, [rule, endless, other])
    assert failed == {endless: Failure("does not end", "a launch was not done after 20 s")}
    assert at_exit == [head_timing._leave]
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    head_timing._leave()
    assert ended == [1], "at once: what takes CUDA down would wait for the device"
    with pytest.raises(DeviceLost, match="does not end: a launch was not done after 20 s"):
        timing.prepare(target, [rule, other])
