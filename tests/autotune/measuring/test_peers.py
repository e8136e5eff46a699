"""Peers of the runners: merged heads, compiled heads, and early exit as people write it."""

import pytest
import torch
from auxhead.autotune.measuring.peers import NaiveHead, PeerAnswer, compiled, in_line, merged_answer, with_item
from auxhead.kernels import ACTIVATIONS, HeadOutput
from auxhead.model import ExitRule, FusedAuxHead, make_trunk
from support.bench_fakes import (
    small_subject,
)
from support.example_models import SmallNet


@pytest.fixture
def subject(without_interpreter):
    return small_subject()


def test_compiled_heads_answer_as_hooked_ones(subject, monkeypatch):
    compiler = torch.compile

    def without_inductor(module, *, mode, dynamic):
        assert mode == "reduce-overhead" and dynamic is False
        return compiler(module, backend="aot_eager", fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", without_inductor)
    network, heads = subject.network, [NaiveHead(head) for head in subject.heads]
    bare, beside = (compiled(network, some, "reduce-overhead") for some in ([], heads))
    for x in subject.inputs:
        assert not bare(x).heads
        said = beside(x)
        with torch.no_grad():
            wanted = in_line(make_trunk(network.backbone, network.taps, x), network.taps, heads, x)
        assert len(said.heads) == 3 and torch.allclose(said.last, wanted.last, atol=1e-5, rtol=0.0)
        assert torch.equal(merged_answer(said).label, merged_answer(wanted).label)
        assert torch.allclose(bare(x).last, wanted.last, atol=1e-5, rtol=0.0)
    for module in network.backbone.modules():
        assert not module._forward_hooks  # those that are compiled in are a copy's


def test_compiled_heads_must_not_get_lost(subject, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **_: lambda x: ([], module.backbone(x)))
    call = compiled(subject.network, [NaiveHead(head) for head in subject.heads], "reduce-overhead")
    with pytest.raises(RuntimeError, match="left out heads: 0 of 3"):
        call(subject.example)


def test_what_people_write_leaves_once_every_sample_was_sure_at_some_head():
    def head(*exits):
        return lambda y: HeadOutput(None, torch.tensor([3, 4]), torch.tensor([0.8, 0.9]), torch.tensor(exits))

    backbone = SmallNet().eval()
    heads = [head(True, False), head(False, True), head(False, False)]
    x = torch.randn(2, 3, 16, 16)
    said = with_item(make_trunk(backbone, SmallNet.taps, x), SmallNet.taps, heads, x)
    assert said.last_exit == 1 and merged_answer(said).exit_index.tolist() == [0, 1]


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize(
    "layers",
    [{}, {"norm": True}, *({"rectifies": True, "hidden_features": 9, "activation": name} for name in ACTIVATIONS)],
    ids=str,
)
def test_heads_as_people_write_them_answer_as_fused_ones(pool, temperature, layers, without_interpreter):
    rule = ExitRule(0.3, temperature=temperature)
    head = FusedAuxHead(12, 5, pool=pool, pool_size=(2, 1), rule=rule, **layers).eval()
    x = torch.randn(40, 6, 4, 3)
    found, wanted = NaiveHead(head)(x), head(x)
    assert torch.equal(found.label, wanted.label) and torch.equal(found.exit, wanted.exit)
    torch.testing.assert_close(found.confidence, wanted.confidence)


def test_merging_takes_the_first_sure_head():
    heads = [
        HeadOutput(None, torch.tensor([1, 1, 1]), torch.tensor([0.9, 0.1, 0.1]), torch.tensor([True, False, False])),
        HeadOutput(None, torch.tensor([2, 2, 2]), torch.tensor([0.8, 0.8, 0.1]), torch.tensor([True, True, False])),
    ]
    answer = merged_answer(PeerAnswer(heads, torch.tensor([[9.0, 0.0]] * 3), 2))
    assert answer.label.tolist() == [1, 2, 0] and answer.exit_index.tolist() == [0, 1, 2]
