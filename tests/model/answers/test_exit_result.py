"""``ExitResult``: answers of successive exits merged sample by sample, and those of a batch's parts joined."""

import pytest
import torch
from auxhead.kernels import HeadOutput
from auxhead.model.answers.exit_result import first_sure


def output(place: int, sure: list[bool], classes: int = 3) -> HeadOutput:
    """An exit's answer for as many samples; all that it says tells exit and sample."""
    said = torch.arange(len(sure)) + 10 * place
    probs = said[:, None] + torch.arange(classes) / 10
    return HeadOutput(probs, said, said / 100, torch.tensor(sure))


@pytest.mark.parametrize("last", [[True] * 4, [False] * 4], ids=["sure", "unsure"])
def test_each_sample_takes_the_first_exit_that_is_sure_or_else_the_last(last: list[bool]) -> None:
    exits = [output(0, [True, False, False, True]), output(1, [True, True, False, False]), output(2, last)]
    found = first_sure(exits, with_probs=True)
    assert found.exit_index.tolist() == [0, 1, 2, 0] and found.exit_index.dtype == torch.int64
    for sample, place in enumerate([0, 1, 2, 0]):
        wanted = exits[place]
        assert found.label[sample] == wanted.label[sample] and found.confidence[sample] == wanted.confidence[sample]
        assert wanted.probs is not None and found.probs is not None
        assert torch.equal(found.probs[sample], wanted.probs[sample])
    assert exits[-1].exit.tolist() == last, "the answers given are left as they are"


def test_probabilities_are_left_out_where_a_head_leaves_them_out() -> None:
    exits = [output(0, [True, False])._replace(probs=None), output(1, [True, True])]
    found = first_sure(exits, with_probs=False)
    assert found.probs is None and found.exit_index.tolist() == [0, 1] and found.label.tolist() == [0, 11]
