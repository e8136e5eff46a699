"""Open samples between stages: none is lost, doubled or out of order, and micro-batches that go on are full."""

import numpy as np
import torch
from auxhead.model.parallel.pipeline.survivors import NOBODY, Merging, no_places
from hypothesis import given
from hypothesis import strategies as st


def micro_batch(places, size):
    """Places, None for nobody, and an activation and a state of them."""
    rows = no_places(size)
    rows[: len(places)] = [NOBODY if place is None else place for place in places]
    of_rows = torch.from_numpy(rows.copy())[:, None]
    return rows, [of_rows.float() * 2, torch.cat([of_rows + 10, of_rows + 20], 1)]


@given(size=st.integers(1, 5), open_=st.lists(st.booleans(), max_size=40))
def test_merging(size, open_):
    """As a stage does for a request: after the last micro-batch one more step lets out what is left."""
    merging = Merging(size, micro_batch([], size)[1])
    for _request in range(2):
        places = [place if stays else None for place, stays in enumerate(open_)]
        steps = [places[start : start + size] for start in range(0, len(places), size)] or [[]]
        came = []
        for step in range(len(steps) + merging.extra_steps):
            of_step, handed = micro_batch(steps[step] if step < len(steps) else [], size)
            out, activations = merging.hand_on(
                of_step, handed if (of_step != NOBODY).any() else None, last=step >= len(steps) - 1
            )
            used = out != NOBODY
            assert out.shape == (size,) and used[: used.sum()].all()
            assert step >= len(steps) - 1 or int(used.sum()) in (0, size)
            for one, other in zip(activations, micro_batch(out[used].tolist(), size)[1], strict=True):
                assert torch.equal(one[used], other[: used.sum()])
            came += out[used].tolist()
        assert came == [place for place in places if place is not None]


def test_what_was_handed_on_is_not_written_to_later():
    """It may be under way still."""
    merging = Merging(2, micro_batch([], 2)[1])
    first, handed = merging.hand_on(*micro_batch([0, 1], 2), last=False)
    kept = first.copy(), handed[0].clone()
    merging.hand_on(*micro_batch([2, 3], 2), last=False)
    assert np.array_equal(first, kept[0]) and torch.equal(handed[0], kept[1])
