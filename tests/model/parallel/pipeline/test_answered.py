"""Networks cut behind their taps: segments are the backbone, and stages answer one after another as all exits do."""

import gc
import weakref

import numpy as np
import pytest
import torch
from auxhead.kernels import decide
from auxhead.kernels.reference.merge import decide_in_order
from auxhead.model import ExitRule
from auxhead.model.answers.exit_result import first_sure
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.parallel.pipeline.answered import ExitDecisions, as_result, cut, first_state, settle
from auxhead.model.parallel.pipeline.stage import Stage
from auxhead.model.parallel.segments import NETWORK, run_segments
from support import pipeline_ranks
from support.example_models import Counting


@pytest.mark.parametrize("cuts", [(1, 2, 3), (2,), ()])
@pytest.mark.parametrize("criteria", [("max_prob",) * 3, ("patience",) * 3, ("margin", "patience", "patience")])
def test_stages_answer_as_all_exits_do(cuts, criteria):
    logits = [torch.randn(64, 4) for _ in range(4)]
    logits[1][:8] = float("nan")
    rules = [ExitRule({"max_prob": 0.6, "margin": 0.5, "patience": 1.0}[name], criterion=name) for name in criteria]
    said = [
        *decide_in_order(
            logits[:3], [(rule.temperature_tensor, rule.threshold_tensor, rule.criterion) for rule in rules]
        ),
        decide(logits[3], 1.0, 1.0),
    ]
    wanted = first_sure(said, with_probs=True)
    alone = [
        *(decide(each, 1.0, rule.threshold_tensor, rule.criterion) for each, rule in zip(logits, rules, strict=False)),
        said[3],
    ]
    state, answers, open_ = first_state(64), [], np.arange(64)
    for start, end in zip((0, *cuts), (*cuts, 4), strict=True):
        exits, their_rules = alone[start:end], [*rules, None][start:end]
        saying = ExitDecisions(state, torch.float32, with_probs=True)
        for index, (of_exit, rule) in enumerate(zip(exits, their_rules, strict=True), start):
            saying.add(of_exit, rule, index)
        said, state = saying.result()
        told = settle(100, 64, said)
        now = told[:, 0] - 100
        assert np.isin(now, open_).all(), "whoever is passed on after an answer is not answered again"
        open_ = np.setdiff1d(open_, now)
        assert np.array_equal(open_, np.flatnonzero(state[:, 2].numpy() == 0))
        answers.append(told)
    assert not len(open_) and sum(map(len, answers)) == 64
    told = torch.from_numpy(np.concatenate(answers))
    found = as_result(told[told[:, 0].argsort()], with_probs=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))
    assert len(wanted.exit_index.unique()) > 2


def test_rows_behind_the_samples_are_nobodys():
    """The last micro-batch may have fewer samples than its size."""
    saying = ExitDecisions(first_state(5), torch.float32, with_probs=False)
    saying.add(decide(torch.randn(5, 4), 1.0, 1.0), None, 2)
    assert settle(7, 3, saying.result()[0])[:, [0, 3]].tolist() == [[7, 2], [8, 2], [9, 2]]


@pytest.mark.parametrize("name", ["plain", "skipping"])
def test_segments_are_the_backbone(name):
    network, x = getattr(pipeline_ranks, name)(), pipeline_ranks.batch_of(name, 4)
    segments = cut(network, x, x.device, "as_is")[0].segments
    with torch.no_grad():
        found = run_segments(segments, x)
        wanted = network.logits(x)
        for (read, _), head, logits in zip(found, network.exit_heads, wanted, strict=False):
            assert torch.equal(head.logits(read), logits)
        assert torch.equal(found[-1][0], wanted[-1]) and not found[-1][1]
    names = {name for name, _ in network.named_parameters()}
    shared = {parameter.data_ptr() for parameter in network.backbone.parameters()}
    for segment in segments:
        assert {each.data_ptr() for each in segment.module.parameters()} <= shared
        assert {name.removeprefix(NETWORK) for name, _ in segment.module.named_parameters()} <= names


def test_a_stage_keeps_no_memory_of_other_segments():
    """Their copies on its device are freed once it is made: a GPU has its own part of the network then."""
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    meta = torch.device("meta")
    made, _ = cut(network, x, meta, "as_is")
    parameters = [[weakref.ref(each) for each in segment.module.parameters()] for segment in made.segments]
    heads = [weakref.ref(head) for head in made.heads]
    assert all(each().device == meta for some in parameters for each in some)
    kept = Stage(made, 1, 2, 4, meta, name="")
    del made
    gc.collect()
    there = [all(each() is not None for each in some) for some in parameters]
    assert there == [index == 1 for index in range(len(parameters))]
    assert [head() is not None for head in heads] == [index == 1 for index in range(len(heads))]
    assert len(kept.modules_run) == 2


def test_a_network_with_a_state_is_refused():
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    network.backbone[1] = Counting(network.backbone[1])
    with pytest.raises(BadInput, match="network: a forward writes to 'backbone.1.calls', wants none that does"):
        cut(network, x, x.device, "as_is")
