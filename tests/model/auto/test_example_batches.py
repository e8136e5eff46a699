"""Batches of the example, and where their samples leave."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from auxhead.model.auto.pass_times import batches_of, exits_of, shares_of
from support.index_networks import Shifting
from support.planner_fakes import images, small_network

pytestmark = pytest.mark.usefixtures("without_interpreter")


def test_an_example_is_cut_into_batches_and_a_short_one_is_filled() -> None:
    x = images(7)
    assert torch.equal(torch.cat(batches_of(x, 3)), x[:6])
    (filled,) = batches_of(x[:2], 5)
    assert torch.equal(filled, torch.cat([x[:2], x[:2], x[:1]]))
    assert len(batches_of(x[:1].expand(100, -1, -1, -1), 2)) == 16


def test_a_backbone_that_changes_its_input_leaves_the_example_as_it_is() -> None:
    x = torch.randint(0, 8, (8, 12))
    before = x.clone()
    heads = {tap: FusedAuxHead(None, 5) for tap in Shifting.taps}
    exits_of(EarlyExitNetwork(Shifting(), heads, example_input=x).eval(), batches_of(x, 4))
    assert torch.equal(x, before)


def test_where_samples_leave() -> None:
    network, x = small_network(), images(12)
    exits = exits_of(network, x.split(4))
    assert torch.equal(exits.flatten(), network(x).exit_index) and exits.shape == (3, 4)
    assert shares_of(torch.tensor([[0, 3], [1, 3], [3, 3], [2, 0]]), 3) == (0.25, 0.125, 0.125, 0.5)
    assert shares_of(torch.zeros(2, 2).long(), 3) == (1, 0, 0, 0)
