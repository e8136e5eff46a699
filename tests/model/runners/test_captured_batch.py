"""Static inputs: a change that a backbone makes in place is seen, whatever the example holds."""

import torch
from auxhead.model.runners.captured_batch import StaticInput


def test_a_change_in_place_is_seen_that_leaves_the_example_as_it_is() -> None:
    static = StaticInput(torch.zeros(4, 3, dtype=torch.int64))
    static.refill()
    static.x.mul_(2)  # of other batches it would make other indices at each run
    static.look_for_changes()
    assert static.changes


def test_an_input_that_is_only_read_does_not_change() -> None:
    static = StaticInput(torch.ones(4, 3))
    static.refill()
    static.x.sum()
    static.look_for_changes()
    assert not static.changes
