"""Open samples between stages: none is lost, doubled or out of order, and micro-batches that go on are full."""

import numpy as np
import pytest
import torch
from auxhead.model.parallel.survivors import Merging, Passing, empty_rows
from hypothesis import given
from hypothesis import strategies as st


def micro_batch(places, size):
    """Rows and an activation of these places, None for an empty row."""
    rows = empty_rows(size)
    for row, place in enumerate(places):
        rows[row] = [-1, -1, 0] if place is None else [place, place + 10, place + 20]
    of_rows = torch.from_numpy(rows.copy())
    return rows, [of_rows[:, :1].float() * 2, of_rows[:, 1:].double()]


@given(data=st.data(), size=st.integers(1, 5), open_=st.lists(st.booleans(), max_size=40))
def test_merging(data, size, open_):
    """As a stage does for a request: after the last micro-batch one more step lets out what is left."""
    merging = Merging(size, micro_batch([], size)[1])
    for _request in range(2):
        places = [place if stays else None for place, stays in enumerate(open_)]
        steps = [places[start : start + size] for start in range(0, len(places), size)] or [[]]
        came = []
        for step in range(len(steps) + merging.extra_steps):
            rows, handed = micro_batch(steps[step] if step < len(steps) else [], size)
            if step < len(steps) and any(place is not None for place in steps[step]):
                out, activations = merging.hand_on(rows, handed, last=step >= len(steps) - 1)
            else:
                out, activations = merging.hand_on(rows, None, last=step >= len(steps) - 1)
            used = out[:, 0] >= 0
            assert out.shape == (size, 3) and used[: used.sum()].all()
            assert step >= len(steps) - 1 or int(used.sum()) in (0, size)
            wanted, like = micro_batch(out[used, 0].tolist(), size)
            assert np.array_equal(out, wanted)
            for one, other in zip(activations, like, strict=True):
                assert torch.equal(one[used], other[used])
            came += out[used, 0].tolist()
        assert came == [place for place in places if place is not None]


def test_what_was_handed_on_is_not_written_to_later():
    """It may be under way still."""
    merging = Merging(2, micro_batch([], 2)[1])
    first, handed = merging.hand_on(*micro_batch([0, 1], 2), last=False)
    kept = first.copy(), handed[0].clone()
    merging.hand_on(*micro_batch([2, 3], 2), last=False)
    assert np.array_equal(first, kept[0]) and torch.equal(handed[0], kept[1])


@pytest.mark.parametrize("last", [False, True])
def test_passing(last):
    passing = Passing(2, micro_batch([], 2)[1])
    rows, handed = micro_batch([None, 4], 2)
    assert passing.hand_on(rows, handed, last=last) == (rows, handed)
    nothing, _ = passing.hand_on(rows, None, last=last)
    assert np.array_equal(nothing, empty_rows(2)) and passing.extra_steps == 0
