"""The broad set: heads that belong to no network, of every kind, at the batch sizes that a sweep tunes them for."""

import torch

from ..heads.random_heads import RandomHead
from ..measuring.heads_alone import AloneHead, Target
from ..records.heads import head_in_words

#: A head at several batch sizes.
Family = tuple[RandomHead, ...]

_CHANNELS_LAST, _CONTIGUOUS = "channels_last", "contiguous"
_ALL, _FEW = (1, 8, 32, 128), (1, 32)


def _family(
    kind: str, sample: tuple[int, ...], classes: int, memory_format: str = _CONTIGUOUS, *, pool: str = "avg",
    pool_size: int = 1, dtype: str = "float16", batches: tuple[int, ...] = _ALL,
) -> Family:  # fmt: skip
    return tuple(
        RandomHead(
            0, 0, kind, (samples, *sample), memory_format, pool, pool_size, hidden=0, activation="relu", norm=False,
            classes=classes, dtype=dtype,
        )
        for samples in batches
    )  # fmt: skip


#: Sizes are those that people have: maps of MobileNetV3, EfficientNet, ConvNeXt and ResNets, the last ones and such as
#: lie before; tokens of ViT-B/16; vectors that a network pooled itself.
BROAD = (
    _family("pooled", (960, 7, 7), 1000, _CHANNELS_LAST),
    _family("pooled", (768, 7, 7), 21843, _CHANNELS_LAST, batches=_FEW),
    _family("pooled", (256, 14, 14), 10),
    _family("pooled", (1280, 7, 7), 100),
    _family("pooled", (1280, 7, 7), 1000, _CHANNELS_LAST, dtype="float32", batches=_FEW),
    _family("windows", (64, 56, 56), 10, _CHANNELS_LAST, pool_size=7),
    _family("windows", (256, 14, 14), 1000, pool_size=2),
    _family("windows", (192, 28, 28), 100, _CHANNELS_LAST, pool_size=4, dtype="bfloat16", batches=_FEW),
    _family("max", (512, 7, 7), 1000, _CHANNELS_LAST, pool="max"),
    _family("max", (128, 28, 28), 10, pool="max"),
    _family("flattened", (64, 56, 56), 10, pool="none"),
    _family("flattened", (64, 56, 56), 10, _CHANNELS_LAST, pool="none"),
    _family("flattened", (512, 7, 7), 1000, pool="none"),
    _family("flattened", (512, 7, 7), 1000, _CHANNELS_LAST, pool="none"),
    _family("flattened", (512, 7, 7), 10, pool="none", dtype="float32", batches=_FEW),
    _family("tokens", (197, 768), 1000),
    _family("first token", (197, 768), 1000, pool="first"),
    _family("vector", (512,), 10, pool="none"),
    _family("vector", (2048,), 21843, pool="none", batches=_FEW),
    _family("vector", (1280,), 100, pool="none", dtype="bfloat16", batches=_FEW),
)


def family_name(family: Family) -> str:
    """Name a head but for its batch size."""
    return head_in_words(family[0].cell).partition("x")[2]


def made(family: Family, device: torch.device) -> dict[Target, AloneHead]:
    """Make a head on a device at each of its batch sizes, with the same data every time."""
    heads = [one.made(device) for one in family]
    return {Target(one.shape): one for one in heads}
