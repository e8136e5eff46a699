"""What exits say, one stage after another, is what all exits say together."""

import pytest
import torch
from auxhead.kernels import decide
from auxhead.kernels.reference.merge import decide_in_order
from auxhead.model import ExitRule
from auxhead.model.answers.exit_result import first_sure
from auxhead.model.parallel.pipeline.answers import AnswerForm, Decisions, all_answered


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
    form = AnswerForm(4, torch.float32, with_probs=True, counts_heads="patience" in criteria)
    said = form.nothing_said(64, torch.device("cpu"))
    for start, end in zip((0, *cuts), (*cuts, 4), strict=True):
        before, stage = said.clone(), Decisions(said, form)
        for index, (of_exit, rule) in enumerate(zip(alone[start:end], [*rules, None][start:end], strict=True), start):
            stage.add(of_exit, rule, index)
        said = stage.result()
        answered = before[:, 2] >= 0
        torch.testing.assert_close(said[answered, 2:], before[answered, 2:], rtol=0.0, atol=0.0, equal_nan=True)
    assert all_answered(said)
    for one, other in zip(form.result(said), wanted, strict=True):
        assert torch.equal(one.nan_to_num(-1.0), other.nan_to_num(-1.0))
    assert len(wanted.exit_index.unique()) > 2
