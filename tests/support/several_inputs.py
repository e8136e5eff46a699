"""Networks of several inputs: words with a mask, and two streams of maps; and batches for them."""

import torch
from torch import Tensor, nn

CLASSES = 3


class Words(nn.Module):
    """Two layers of a transformer on words; padding is told by a mask."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(30, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, ids: Tensor, padding_mask: Tensor) -> Tensor:
        y = self.encoder(self.words(ids), src_key_padding_mask=padding_mask)
        kept = ~padding_mask[..., None]
        return self.classifier((y * kept).sum(1) / kept.sum(1))


def words(*lengths: int, seed: int = 0, to: int | None = None) -> dict[str, Tensor]:
    """Return sentences of these lengths, padded to the longest or further; what is in the padding is drawn, too."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(30, (max(64, *lengths),), generator=drawn) for _ in lengths])
    padding = torch.arange(ids.shape[1])[None] >= torch.tensor(lengths)[:, None]
    longest = max(lengths) if to is None else to
    return {"ids": ids[:, :longest], "padding_mask": padding[:, :longest]}


def _stream(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())


class TwoStreams(nn.Module):
    """Pictures and their motion, fused late, times a number of each sample and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures, self.motion = _stream(3), _stream(2)
        self.fusion, self.classifier = nn.Conv2d(16, 8, 1), nn.Linear(8, CLASSES)

    def forward(self, pictures: Tensor, motion: Tensor, times: Tensor, scale: float = 1.0) -> Tensor:
        y = self.fusion(torch.cat([self.pictures(pictures), self.motion(motion)], 1)).relu()
        return self.classifier(y.mean((2, 3)) * times[:, None]) * scale


def streams(samples: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return pictures, motion and numbers."""
    drawn = torch.Generator().manual_seed(seed)
    sizes = (samples, 3, 7, 9), (samples, 2, 7, 9), (samples,)
    pictures, motion, times = (torch.randn(size, generator=drawn) for size in sizes)
    return pictures, motion, times.abs() + 1
