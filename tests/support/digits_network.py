"""A small network that was trained on some of the digits, and those that it has not learned from."""

import functools

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from torch import nn


def batches(images, labels, size=100):
    return list(zip(images.split(size), labels.split(size), strict=True))


@functools.cache
def digits():
    """Images [1797, 1, 8, 8], 0 to 1, and labels, in random order."""
    pytest.importorskip("sklearn")
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(found.images / 16.0).float()[:, None]
    return images[order], torch.from_numpy(found.target).long()[order]


@functools.cache
def trained_state():
    images, labels = (part[:500] for part in digits())
    torch.manual_seed(0)
    network = untrained()
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    for _ in range(60):
        loss = sum(nn.functional.cross_entropy(logits, labels) for logits in network.logits(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.state_dict()


def untrained():
    backbone = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
    )
    heads = {"0": FusedAuxHead(8 * 4, 10, pool_size=(2, 2)), "1": FusedAuxHead(16 * 4, 10, pool_size=(2, 2))}
    return EarlyExitNetwork(backbone, heads)
