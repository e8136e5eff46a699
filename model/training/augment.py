"""``augmented``: random changes of decoded pictures in training, drawn picture by picture from one generator."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: What may be changed: nothing; a place, by up to a sixteenth of the side; a cut, its size and the side on which things
#: are (torchvision's random resized crop and flip, Szegedy et al. 2015); and besides one thing more, colours or shape
#: (TrivialAugment, Müller & Hutter 2021).
AUGMENTATIONS = ("none", "shift", "standard", "trivial")
#: Of a side the part by which pictures are shifted at most.
_LARGEST_SHIFT = 16


def augmented(pixels: Tensor, kind: str, generator: torch.Generator, own: slice = slice(None)) -> Tensor:
    """Return pictures of a batch, changed at random.

    Args:
        pixels: uint8 [N, C, H, W].
        kind: one of ``AUGMENTATIONS``.
        generator: on the CPU, so that a seed means the same on every device; it goes on by the whole batch.
        own: those that are returned, of all that are drawn for.
    """
    if kind == "none":
        return pixels[own]
    if kind == "shift":
        return random_shift(pixels, max(1, pixels.shape[-1] // _LARGEST_SHIFT), generator)[own]
    seeds = torch.randint(2**62, (len(pixels),), generator=generator, device="cpu")[own].tolist()
    change = _changes(kind, pixels.shape[-1])
    changed = []
    with torch.random.fork_rng(devices=[]):
        for one, seed in zip(pixels[own], seeds, strict=True):
            torch.default_generator.manual_seed(seed)  # that of the CPU alone, which torchvision draws from
            changed.append(change(one))
    return torch.stack(changed)


@cache
def _changes(kind: str, size: int) -> Callable[[Tensor], Tensor]:
    from torchvision.transforms import v2

    steps: list[Any] = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    if kind == "trivial":
        steps.append(v2.TrivialAugmentWide())
    made: Callable[[Tensor], Tensor] = v2.Compose(steps)
    return made


def random_shift(pixels: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Shift each image of [N, C, H, W] by up to ``most`` pixels either way, and fill up with black.

    Does the same as torchvision's ``RandomCrop((H, W), padding=most)`` on each image, for a batch at once. Draws from
    ``generator`` on the CPU, so that a seed means the same on every device.
    """
    if most == 0:
        return pixels
    batch, _, height, width = pixels.shape
    padded = F.pad(pixels, (most, most, most, most))
    start = torch.randint(0, 2 * most + 1, (2, batch), generator=generator, device="cpu").to(pixels.device)
    rows = start[0, :, None, None] + torch.arange(height, device=pixels.device)[:, None]  # [N, H, 1]
    columns = start[1, :, None, None] + torch.arange(width, device=pixels.device)  # [N, 1, W]
    sample = torch.arange(batch, device=pixels.device)[:, None, None]
    return padded[sample, :, rows, columns].permute(0, 3, 1, 2).contiguous()  # as loaders': for backbones with a .view
