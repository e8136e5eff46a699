"""Heads drawn at random, of every kind that a fused head can be: the same ones of a seed, however many are drawn."""

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...kernels import ACTIVATIONS
from ...model import FusedAuxHead
from ..measuring.heads_alone import AloneHead
from ..records.heads import KINDS

#: What a head's input may take, and its parameters, bytes.
MOST_BYTES = 512_000_000
#: Of a hundred heads, so many are of each of ``KINDS``.
_SHARES = dict(zip(KINDS, (20, 13, 10, 20, 8, 5, 8, 10, 6), strict=True))
#: Kinds that are a layer more before the last one, whatever else they read.
_DEEPER = ("hidden", "norm")
#: Of ten sizes, so many are usual ones; the others lie anywhere between two ends, as many below their middle as above,
#: in logarithms.
_USUAL_OF_TEN = 7
_SAMPLES = (1, 8, 32, 128)
_CLASSES = (2, 10, 100, 1000, 21843)
#: Those of ResNets, ViTs and ConvNeXts.
_CHANNELS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
_SIDES = (7, 8, 14, 28, 56)
_TOKENS = (50, 197, 257, 577)
_WINDOWS = (2, 3, 4, 7)
_HIDDEN = (64, 128, 256, 512, 1024)
_DTYPES = ("float16", "float16", "float16", "bfloat16", "float32")
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
#: Logits are so large in the root mean square that labels differ, and no probability is 1.
_LOGITS = 2.0


class RandomHead(NamedTuple):
    """A head of no network and its input, by their sizes: drawn, or of the broad set, which has seed and number 0."""

    seed: int
    number: int
    """The first one of a seed is number 0."""
    kind: str
    """One of ``KINDS``."""
    input: tuple[int, ...]
    """Sizes of a map, of tokens or of pooled vectors."""
    memory_format: str
    """Of the input, one of ``_FORMATS``."""
    pool: str
    pool_size: int
    hidden: int
    """Features of a hidden layer; 0: there is none."""
    activation: str
    norm: bool
    classes: int
    dtype: str

    @property
    def cell(self) -> dict[str, Any]:
        """The cell of its records."""
        return {**self._asdict(), "input": list(self.input)}

    @property
    def features(self) -> int:
        """Features that the first linear layer reads."""
        _, *sizes = self.input
        if self.pool == "none" or len(sizes) == 1:
            return math.prod(sizes)
        return sizes[0] * self.pool_size**2 if len(sizes) == 3 else sizes[-1]

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of the input and, but for biases and norms, of the parameters."""
        weights = self.hidden * (self.features + self.classes) if self.hidden else self.features * self.classes
        size = getattr(torch, self.dtype).itemsize
        return math.prod(self.input) * size, weights * size

    def planned(self, device: torch.device) -> AloneHead:
        """Return it without any data; launches are chosen for a device."""
        return AloneHead(*self._empty(torch.device("meta")), device)

    @torch.no_grad()
    def made(self, device: torch.device) -> AloneHead:
        """Make it on a device, with data that are drawn there."""
        head, x = self._empty(device)
        generator = torch.Generator(device).manual_seed(self.number)
        x.normal_(generator=generator)
        if len(self.input) == 4:
            x.relu_()  # as behind most blocks of convolutions
        for one in head.parameters():
            one.normal_(0.0, one.shape[1] ** -0.5 if one.ndim > 1 else 1.0, generator=generator)
        products = head.logits(x) - head.linear.bias
        head.linear.weight.mul_(_LOGITS / products.float().square().mean().sqrt())
        return AloneHead(head, x)

    def _empty(self, device: torch.device) -> tuple[FusedAuxHead, torch.Tensor]:
        dtype = getattr(torch, self.dtype)
        head = FusedAuxHead(
            self.features, self.classes, pool=self.pool, pool_size=self.pool_size,
            hidden_features=self.hidden or None, activation=self.activation, norm=self.norm, device=device, dtype=dtype,
        )  # fmt: skip
        layout = _FORMATS[self.memory_format]
        return head.eval(), torch.empty(self.input, dtype=dtype, device=device, memory_format=layout)


def draw(seed: int, number: int) -> RandomHead:
    """Draw a head of a seed, whose input and whose parameters take at most ``MOST_BYTES`` each."""
    drawing = _Drawing(seed, number)
    kind = drawing.one_of([kind for kind, share in _SHARES.items() for _ in range(share)])
    while True:
        head = drawing.head(seed, number, kind)
        if max(head.bytes) <= MOST_BYTES:
            return head


class _Drawing:
    """Draws parts of a head, by the one function of ``random`` whose numbers no version of Python changes."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = random.Random(f"{seed} {number}").random

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[int(self._random() * len(values))]

    def size(self, usual: Sequence[int], low: int, high: int) -> int:
        if self._random() < _USUAL_OF_TEN / 10:
            return int(self.one_of(usual))
        return round(low * (high / low) ** self._random())

    def head(self, seed: int, number: int, kind: str) -> RandomHead:
        """Draw a head of a kind, of any size."""
        hidden = self.size(_HIDDEN, 16, 1024) if kind == "hidden" else 0
        reads = self.one_of([one for one in KINDS if one not in _DEEPER]) if kind in _DEEPER else kind
        sizes, pool, windows = self._read(reads)
        return RandomHead(
            seed, number, kind,
            input=(self.size(_SAMPLES, 1, 256), *sizes),
            memory_format=self.one_of(list(_FORMATS)) if len(sizes) == 3 else "contiguous",
            pool=pool,
            pool_size=windows,
            hidden=hidden,
            activation=self.one_of(list(ACTIVATIONS)) if hidden else "relu",
            norm=kind == "norm" or hidden > 0 and self.one_of((True, False)),
            classes=self.size(_CLASSES, 2, 21843),
            dtype=self.one_of(_DTYPES),
        )  # fmt: skip

    def _read(self, kind: str) -> tuple[tuple[int, ...], str, int]:
        """Draw the sizes of a sample, the pool and its windows of a kind that is none of ``_DEEPER``."""
        channels = self.size(_CHANNELS, 16, 2048)
        if kind == "vector":
            return (channels,), "none", 1
        tokens = (self.size(_TOKENS, 16, 1024), channels)
        if kind in ("tokens", "first token"):
            return tokens, "first" if kind == "first token" else self.one_of(("avg", "max")), 1
        height = self.size(_SIDES, 4, 64)
        sizes = (channels, height, self.one_of((*[height] * 4, self.size(_SIDES, 4, 64))))
        if kind == "flattened":
            return self.one_of((*[sizes] * 5, tokens)), "none", 1
        windows = min(self.size(_WINDOWS, 2, 8), *sizes[1:])
        if kind == "max":
            return sizes, "max", self.one_of((1, 1, windows))
        return sizes, "avg", 1 if kind == "pooled" else windows
