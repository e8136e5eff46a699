"""The broad set: heads that belong to no network, of every kind, at the batch sizes that a sweep tunes them for."""

from typing import NamedTuple

import torch

from ...model import FusedAuxHead
from ..measuring.heads_alone import AloneHead, Target

#: Logits are so large in the root mean square that labels differ, and no probability is 1.
_LOGITS = 2.0


class BroadHead(NamedTuple):
    """A head at several batch sizes."""

    sample: tuple[int, ...]
    """Sizes of one sample: a map, tokens or a vector."""
    classes: int
    pool: str = "avg"
    pool_size: int = 1
    channels_last: bool = True
    dtype: str = "float16"
    batches: tuple[int, ...] = (1, 8, 32, 128)

    def __str__(self) -> str:
        size = "x".join(map(str, self.sample))
        return f"{size}, {self.pool} {self.pool_size}, {self.classes:,} classes, {self.dtype}"

    def made(self, device: torch.device) -> dict[Target, AloneHead]:
        """Make it on a device, with the same data every time, for each of its batch sizes."""
        found = [self._made(samples, device) for samples in self.batches]
        return {Target(one.shape): one for one in found}

    @torch.no_grad()
    def _made(self, samples: int, device: torch.device) -> AloneHead:
        dtype = getattr(torch, self.dtype)
        channels_last = self.channels_last and len(self.sample) == 3
        layout = torch.channels_last if channels_last else torch.contiguous_format
        x = torch.empty((samples, *self.sample), dtype=dtype, device=device, memory_format=layout)
        generator = torch.Generator(device).manual_seed(0)
        x.normal_(generator=generator)
        head = FusedAuxHead(
            None, self.classes, pool=self.pool, pool_size=self.pool_size, device=device, dtype=dtype
        ).eval()  # fmt: skip
        head.logits(x)  # makes its parameters
        for one in head.parameters():
            one.normal_(generator=generator)
        head.linear.weight.mul_(_LOGITS / (head.logits(x) - head.linear.bias).float().square().mean().sqrt())
        return AloneHead(head, x)


_FEW = (1, 32)
#: Sizes are those of networks that people have: maps of MobileNetV3, EfficientNet, ConvNeXt, ResNets and what lies
#: before their last stages; tokens of ViT-B/16; vectors that a network pooled itself.
BROAD = (
    BroadHead((960, 7, 7), 1000),
    BroadHead((768, 7, 7), 21843, batches=_FEW),
    BroadHead((256, 14, 14), 10, channels_last=False),
    BroadHead((1280, 7, 7), 100, channels_last=False),
    BroadHead((1280, 7, 7), 1000, dtype="float32", batches=_FEW),
    BroadHead((197, 768), 1000),
    BroadHead((64, 56, 56), 10, pool_size=7),
    BroadHead((256, 14, 14), 1000, pool_size=2, channels_last=False),
    BroadHead((192, 28, 28), 100, pool_size=4, dtype="bfloat16", batches=_FEW),
    BroadHead((512, 7, 7), 1000, pool="max"),
    BroadHead((128, 28, 28), 10, pool="max", channels_last=False),
    BroadHead((64, 56, 56), 10, pool="none"),
    BroadHead((64, 56, 56), 10, pool="none", channels_last=False),
    BroadHead((512, 7, 7), 1000, pool="none"),
    BroadHead((512, 7, 7), 1000, pool="none", channels_last=False),
    BroadHead((512, 7, 7), 10, pool="none", dtype="float32", batches=_FEW),
    BroadHead((768,), 1000),
    BroadHead((512,), 10),
    BroadHead((2048,), 21843, batches=_FEW),
    BroadHead((1280,), 100, dtype="bfloat16", batches=_FEW),
)
