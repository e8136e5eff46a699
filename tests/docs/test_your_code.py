"""The lines of "Your code, and what to write" in model/README.md that have no snippet of their own."""

import torch
from auxhead.model import FusedAuxHead
from support.documents import Document
from torch import nn

PAGE = Document("model/README.md")


def test_a_linear_layer_for_vectors():
    PAGE.says("| `FusedAuxHead.from_module(nn.Sequential(linear))` |")
    linear, x = nn.Linear(8, 3), torch.randn(4, 8)
    head = FusedAuxHead.from_module(nn.Sequential(linear))
    assert head.linear is linear
    torch.testing.assert_close(head(x).probs, linear(x).softmax(1))


def test_a_linear_layer_for_averaged_maps():
    PAGE.says("`FusedAuxHead.from_module(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.exit1.fc))`")
    linear, x = nn.Linear(8, 3), torch.randn(4, 8, 5, 5)
    head = FusedAuxHead.from_module(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear))
    torch.testing.assert_close(head(x).probs, linear(x.mean((2, 3))).softmax(1))


def test_a_binary_classifier():
    PAGE.says("`two.weight.data = torch.cat([torch.zeros_like(fc.weight), fc.weight])`, the bias alike; ")
    fc, x = nn.Linear(8, 1), torch.randn(4, 8)
    two = nn.Linear(fc.in_features, 2)
    two.weight.data = torch.cat([torch.zeros_like(fc.weight), fc.weight])
    two.bias.data = torch.cat([torch.zeros_like(fc.bias), fc.bias])
    torch.testing.assert_close(two(x).softmax(1)[:, 1], fc(x).sigmoid()[:, 0])


def test_a_linear_layer_for_the_first_token():
    PAGE.says('`head = FusedAuxHead(768, 10, pool="first")`, then `head.linear = linear`')
    linear, x = nn.Linear(8, 3), torch.randn(4, 6, 8)
    head = FusedAuxHead(8, 3, pool="first")
    head.linear = linear
    torch.testing.assert_close(head(x).probs, linear(x[:, 0]).softmax(1))
    assert head.state_dict()["linear.weight"].data_ptr() == linear.weight.data_ptr()
