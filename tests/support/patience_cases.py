"""Networks some of whose heads exit under patience, and their answers by a plain loop over what each head says."""

from collections.abc import Sequence

import torch
from auxhead.model import EarlyExitNetwork, ExitResult, ExitRule
from torch import Tensor

#: Rules of three heads.
RULES = {
    "all patient": [ExitRule(1, criterion="patience")] * 3,
    "the last alone": [ExitRule(0.9), ExitRule(0.9), ExitRule(2, criterion="patience")],
    "mixed": [ExitRule(0.9), ExitRule(1, criterion="patience"), ExitRule(0.5, criterion="margin")],
    "disabled heads count": [
        ExitRule(0, criterion="patience", enabled=False),
        ExitRule(0.0, enabled=False),
        ExitRule(2, criterion="patience", temperature=3.0),
    ],
    "at once": [ExitRule(1.0), ExitRule(0, criterion="patience"), ExitRule(1.0)],
}


def set_rules(network: EarlyExitNetwork, rules: Sequence[ExitRule]) -> None:
    """Give each head its rule."""
    network.set_rules(dict(zip(network.taps, rules, strict=True)))


def said_by(logits: Sequence[Tensor], rules: Sequence[ExitRule]) -> tuple[list[int], list[int], list[float | None]]:
    """Return exit and label of each sample, and the count of those that leave under patience."""
    labels = torch.stack([y.argmax(1) for y in logits]).tolist()
    exits, answers, counts = [], [], []
    for sample in range(len(logits[0])):
        place, count = len(rules), None
        for index, rule in enumerate(rules):
            if not rule.enabled:
                continue
            if rule.criterion == "patience":
                row = 1
                while row <= index and labels[index - row][sample] == labels[index][sample]:
                    row += 1
                if row >= rule.threshold + 1:
                    place, count = index, float(row)
                    break
            else:
                first, second = (logits[index][sample] / rule.temperature).softmax(0).topk(2).values.tolist()
                if (first if rule.criterion == "max_prob" else first - second) > rule.threshold:
                    place = index
                    break
        exits.append(place)
        answers.append(labels[place][sample])
        counts.append(count)
    return exits, answers, counts


def assert_answers(found: ExitResult, network: EarlyExitNetwork, x: Tensor, rules: Sequence[ExitRule]) -> None:
    """Compare an answer with the loop's."""
    with torch.no_grad():
        exits, labels, counts = said_by([y.float().cpu() for y in network.logits(x)], rules)
    assert found.exit_index.tolist() == exits and found.label.tolist() == labels
    for confidence, count in zip(found.confidence.tolist(), counts, strict=True):
        assert count is None or confidence == count
