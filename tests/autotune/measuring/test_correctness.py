"""Comparison with the truth: differences beyond rounding are told from those within."""

import pytest
import torch
from auxhead.autotune.measuring.eager_truth import Answer, Comparison, Expected, wrong_in_words


def test_comparison():
    right = Answer(torch.tensor([1, 2, 3, 0]), torch.full((4,), 0.5).double(), torch.tensor([0, 0, 1, 1]))
    possible = torch.eye(4, dtype=torch.bool)[right.label]
    possible[1, 0] = True  # the second sample's label may be 0 as well, the third may leave elsewhere
    truth = Expected(right, torch.tensor([False, False, True, False]), possible, torch.full((4,), 0.01))

    def counts(**changes):
        comparison = Comparison()
        comparison.add(right, truth)
        comparison.add(right._replace(**changes), truth)
        return comparison.counts()

    fine = counts(label=torch.tensor([1, 0, 3, 0]), exit_index=torch.tensor([0, 0, 0, 1]))
    assert fine == {"samples": 8, "differing": 2, "differing_near": 2, "near": 4, "confidence_off": 0}
    assert wrong_in_words(fine) is None
    elsewhere = counts(exit_index=torch.tensor([0, 0, 0, 1]), confidence=torch.tensor([0.5, 0.5, 0.9, 0.5]).double())
    assert elsewhere["confidence_off"] == 0, "of another exit, whose confidence is another"
    assert wrong_in_words(counts(label=torch.tensor([0, 2, 3, 0]))).startswith("answers differ")
    assert "1 of 8" in wrong_in_words(counts(label=torch.tensor([1, 3, 3, 0])))
    assert "1 of 8" in wrong_in_words(counts(label=torch.tensor([1, 2, 3, 4])))
    assert "1 of 8" in wrong_in_words(counts(exit_index=torch.tensor([0, 0, 1, 0])))
    for wrong in (0.52, float("nan")):
        off = counts(confidence=torch.tensor([0.5, 0.5, 0.5, wrong]).double())
        assert off["confidence_off"] == 1 and wrong_in_words(off).startswith("confidences differ")
    assert wrong_in_words(Comparison().counts()) == "nothing was compared"
    with pytest.raises(ValueError, match=r"answers for \(3,\) samples"):
        Comparison().add(Answer(*(field[:3] for field in right)), truth)
