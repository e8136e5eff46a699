"""Answers of stages one after another are those of all exits at once."""

import numpy as np
import pytest
import torch
from auxhead.kernels import decide
from auxhead.kernels.reference.merge import decide_in_order
from auxhead.model import ExitRule
from auxhead.model.answers.exit_result import first_sure
from auxhead.model.parallel.pipeline.answered import ExitDecisions, as_result, first_state, settle


@pytest.mark.parametrize("cuts", [(1, 2, 3), (2,), ()])
@pytest.mark.parametrize("criteria", [("max_prob",) * 3, ("patience",) * 3, ("margin", "patience", "patience")])
def test_stages_answer_as_all_exits_do(cuts, criteria):
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    saying = ExitDecisions(first_state(5), torch.float32, with_probs=False)
    saying.add(decide(torch.randn(5, 4), 1.0, 1.0), None, 2)
    assert settle(7, 3, saying.result()[0])[:, [0, 3]].tolist() == [[7, 2], [8, 2], [9, 2]]
