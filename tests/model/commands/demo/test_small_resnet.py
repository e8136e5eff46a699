"""The demo's network: its resolution and its heads."""

import pytest
import torch
from auxhead.model.commands.demo.small_resnet import BLOCKS, resnet18_small, small_early_exit_network

pytestmark = pytest.mark.usefixtures("without_interpreter")


def test_the_small_resnet_keeps_the_resolution_of_a_small_image():
    network = resnet18_small(7).eval()
    with torch.no_grad():
        assert network(torch.zeros(2, 3, 16, 16)).shape == (2, 7)
        early = network.maxpool(network.relu(network.bn1(network.conv1(torch.zeros(1, 3, 16, 16)))))
    assert early.shape == (1, 64, 16, 16)


def test_every_block_has_a_head_and_none_exits():
    network = small_early_exit_network(4).eval()
    assert network.taps == BLOCKS and len(BLOCKS) == 8
    assert (network(torch.randn(3, 3, 16, 16)).exit_index == 8).all()
