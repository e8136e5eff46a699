"""Patience, in reference/merge.py and jit/merge.py: heads in a row that agree, as a loop over labels counts them."""

import math

import pytest
import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, HeadOutput
from auxhead.kernels.reference.merge import in_order
from hypothesis import example, given, settings
from hypothesis import strategies as st

CLASSES, LAST = 3, 4


def counted(labels: list[int | None]) -> float:
    """How many of the labels, from the end on, are the last one; None is a head that cannot tell."""
    if labels[-1] is None:
        return math.nan
    return float(next((n for n, label in enumerate(reversed(labels)) if label != labels[-1]), len(labels)))


#: Of each sample what four heads and a classifier say.
sayings = st.lists(
    st.lists(st.sampled_from([0, 1, 1, 2, None]), min_size=LAST + 1, max_size=LAST + 1), min_size=1, max_size=4
)
#: Of each head its threshold under patience, or None for one by its largest probability, which is never sure.
rules = st.lists(st.sampled_from([None, 0.0, 1.0, 1.5, 2.0, 3.0, 3e38]), min_size=LAST, max_size=LAST)


def by_loop(said: list[int | None], thresholds: list[float | None]) -> tuple[int, float | None]:
    """The exit of a sample and its confidence; None for that of the classifier."""
    for place, threshold in enumerate(thresholds):
        if threshold is not None and (count := counted(said[: place + 1])) > threshold:
            return place, count
    return LAST, None


def logits(said: list[list[int | None]], place: int, device: torch.device) -> torch.Tensor:
    rows = [[math.nan] * CLASSES if one[place] is None else [4.0 * (k == one[place]) for k in range(CLASSES)]
            for one in said]  # fmt: skip
    return torch.tensor(rows, device=device)


@settings(deadline=None)
@given(sayings, st.sampled_from([torch.float32, torch.float64]))
def test_the_count_is_that_of_a_loop(said, dtype):
    heads = []
    for place in range(LAST):
        label = torch.tensor([0 if one[place] is None else one[place] for one in said])
        alone = torch.tensor([math.nan if one[place] is None else 0.5 for one in said], dtype=dtype)
        heads.append(HeadOutput(None, label, alone, alone > 1))
        found = in_order(heads, torch.tensor(1.0), "patience")
        wanted = torch.tensor([counted(one[: place + 1]) for one in said], dtype=dtype)
        torch.testing.assert_close(found.confidence, wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.exit, wanted > 1) and torch.equal(found.label, label)


#: How the heads and the classifier share launches: the last place of each.
SHARES = {"a launch each": (0, 1, 2, 3, 4), "two, two and one": (1, 3, 4), "one for all": (4,), "one, four": (0, 4)}


@pytest.mark.parametrize("share", SHARES)
def test_launches_merge_as_a_loop_does(share, device):
    @settings(deadline=None, max_examples=5 if device.type == "cpu" else 30)
    @given(sayings, rules, st.integers(1, 4))
    @example([[1, 1, 1, 2, 0], [2, 1, 1, 1, 0]], [None, None, 2.0, 2.0], 2)  # labels of earlier launches count
    @example([[None, 0, 0, 0, 0], [None, None, 0, 0, 1]], [None, None, 2.0, 2.0], 2)  # the label of a NaN is 0
    def check(said, thresholds, valid):
        samples, valid = len(said), min(valid, len(said))
        buffers = ExitBuffers.allocate(LAST + 1, samples, CLASSES, with_probs=True, device=device)
        buffers.valid.fill_(valid)
        one = torch.ones(1, device=device)
        heads = [
            ExitHead(
                torch.eye(CLASSES, device=device), None, one,
                one if threshold is None else one * threshold, "avg", (1, 1),
                "max_prob" if threshold is None else "patience",
            )
            for threshold in thresholds
        ]  # fmt: skip
        xs = [logits(said, place, device) for place in range(LAST + 1)]
        launches, start = [], 0
        for end in SHARES[share]:
            launches.append((ExitLaunch(buffers, start, [*heads, None][start : end + 1]), xs[start : end + 1]))
            start = end + 1
        for _ in range(2 if device.type == "cuda" else 1):  # interpreted, a launch takes as long as its checks
            buffers.packed_answer.fill_(255)
            for launch, some in launches:
                launch(some)
                assert not any(counters.any() for counters in launch._counters), "zeros are put back for the next one"
            label, exit_index, confidence, probs = buffers.answer(buffers.packed_answer)
            for sample in range(valid):
                place, count = by_loop(said[sample], thresholds)
                assert exit_index[sample] == place
                assert label[sample] == buffers.label[place, sample]
                torch.testing.assert_close(probs[sample], buffers.probs[place, sample], equal_nan=True)
                if count is not None:
                    assert confidence[sample] == count and label[sample] == said[sample][place]

    check()
