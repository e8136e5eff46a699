"""Small networks and the digits, for tests of training."""

from functools import cache

import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from auxhead.model.training.data_sets import Split, read_splits
from auxhead.model.training.sources import load_digits
from support.pictures import whole
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Blocks(nn.Module):
    """Two convolutions and a classifier, with batch norms or without."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.first, self.second = self._block(3, 8, norm), self._block(8, 16, norm)
        self.fc = nn.Linear(16, 10)

    @staticmethod
    def _block(channels: int, width: int, norm: bool) -> nn.Sequential:
        conv = nn.Conv2d(channels, width, 3, 2, 1, bias=not norm)
        return nn.Sequential(conv, nn.BatchNorm2d(width) if norm else nn.Identity(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(x)).mean((2, 3)))


def trainable(*, norm: bool = True, dropout: float = 0.0, seed: int = 0) -> EarlyExitNetwork:
    """A network with a head that averages windows of a grid, and one that takes their maximum."""
    torch.manual_seed(seed)
    heads = {
        "first": FusedAuxHead(32, 10, pool_size=2, dropout=dropout),
        "second": FusedAuxHead(64, 10, pool="max", pool_size=2, dropout=dropout),
    }
    return EarlyExitNetwork(Blocks(norm), heads)


@cache
def digits() -> tuple[Split, Split]:
    """The digits to train on, and those for validation."""
    _, splits = read_splits(load_digits(), whole(8), 0)
    return splits.train, splits.validation


def part_of(split: Split, part: slice) -> Split:
    """Some of the images of a split."""
    assert split.contents is not None
    of_images = {name: getattr(split, name)[part] for name in ("pixels", "labels", "indices")}
    return split._replace(**of_images, contents=split.contents[:, part])


def images(split: Split, count: int | None = None) -> TensorDataset:
    """Some images of a split as a data set of PyTorch, (float32 -1 to 1, label) each."""
    return TensorDataset(split.pixels[:count] / 127.5 - 1.0, split.labels[:count])


def tensors(network: EarlyExitNetwork) -> dict[str, Tensor]:
    """Copies of the parameters and buffers of a network, by name; no rules."""
    named = network.state_dict().items()
    return {name: value.detach().clone() for name, value in named if "_extra_state" not in name}


def assert_equal_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
