"""Networks in which indices cross a tap, or change in place: where memory is wrong, an index is out of range."""

import torch
from torch import Tensor, nn


class Unpooling(nn.Module):
    """Hands the places of its maxima past two taps, to put them back there."""

    taps = ("enter", "middle")

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.unpool = nn.MaxUnpool2d(2)
        self.exit = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)))
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x, indices = self.pool(self.enter(x))
        x = self.middle(x)
        x = self.unpool(x, indices)
        del indices  # its memory goes to what follows
        return self.fc(self.exit(x).mean((2, 3)))


class Pruning(nn.Module):
    """Keeps the tokens that it finds important, chosen in one segment and gathered in the next."""

    taps = ("block0", "block1")

    def __init__(self, classes: int = 5, width: int = 16) -> None:
        super().__init__()
        self.score = nn.Linear(width, 1)
        self.block0 = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.block1 = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.score(x).squeeze(2).topk(4, dim=1).indices
        x = self.block0(x)
        x = torch.gather(x, 1, kept[:, :, None].expand(-1, -1, x.shape[2]))
        del kept
        x = self.block1(x)
        for _ in range(4):
            x = x + torch.tanh(x)
        return self.fc(x.mean(1))


class Shifting(nn.Module):
    """Changes its input in place, as a tokenizer's offset does: indices are out of range the second time."""

    taps = ("block0", "block1")

    def __init__(self, classes: int = 5, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.block0 = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.block1 = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.fc = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        ids.add_(8)  # which tracing does not make an operator of its own of, as it does of +=
        x = self.block1(self.block0(self.embedding(ids)))
        return self.fc(x.mean(1))
