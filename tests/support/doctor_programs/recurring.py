"""Programs that do in each request what belongs before the first one, or nowhere; and the same without that fault."""

import ctypes
import gc
import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .layers import Wide, wide_input
from .program import Made, Program, device, planted


class ChannelsLast(nn.Sequential):
    """Convolutions that cuDNN transposes nothing for."""

    def __init__(self) -> None:
        super().__init__(Wide(), Wide(), Wide())
        self.to(memory_format=torch.channels_last)


def channels_last_input() -> Tensor:
    return wide_input().to(memory_format=torch.channels_last)


class Uploading(ChannelsLast):
    """Uploads a mask of 13 MB between its layers, by a call of the runtime that waits or by one that does not."""

    def __init__(self, name: str, *stream: int) -> None:
        super().__init__()
        major = (torch.version.cuda or "").partition(".")[0]
        self.function = getattr(ctypes.CDLL(f"libcudart.so.{major}"), name)
        self.stream = [ctypes.c_void_p(one) for one in stream]
        self.mask = torch.ones(64, 1, 224, 224).pin_memory()
        self.there = torch.empty_like(self.mask, device=device())

    def forward(self, x: Tensor) -> Tensor:
        y = self[0](x)
        ends = ctypes.c_void_p(self.there.data_ptr()), ctypes.c_void_p(self.mask.data_ptr())
        assert self.function(*ends, ctypes.c_size_t(self.mask.nbytes), 1, *self.stream) == 0  # 1: to the device
        return self[2](self[1](y))


class Collecting(ChannelsLast):
    def forward(self, x: Tensor) -> Tensor:
        y = self[0](x)
        gc.collect()  # "to save memory"
        return self[2](self[1](y))


class Pausing(ChannelsLast):
    """Every tenth request takes 30 ms more; or each does."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self.requests = every, itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        if next(self.requests) % self.every == 0:
            time.sleep(0.03)
        return super().forward(x)


class Loading(ChannelsLast):
    """Goes through elementwise functions, each three times; or calls one."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.functions = itertools.cycle(function for function in functions for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return next(self.functions)(super().forward(x))


class Casting(nn.Module):
    """A sum in float32 of what is kept in half precision, layer by layer; or all in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = (x.float() + 1.0).to(self.dtype)
        return x


def multiplying(dtype: torch.dtype) -> Made:
    """Matrix products: in float32 PyTorch multiplies without TF32 unless it is told to."""
    size = 4096 if torch.cuda.is_available() else 16
    layers = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))
    return layers.to(device(), dtype).eval(), torch.randn(size, size, device=device(), dtype=dtype)


def _contiguous() -> Made:
    return nn.Sequential(Wide(), Wide(), Wide()), wide_input()


#: Each of them in a file of PyTorch's own, whose code is loaded when it is first launched.
RARE = (
    *(torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.sinh, torch.cosh, torch.asinh),
    *(torch.acosh, torch.atanh, torch.expm1, torch.log1p, torch.log2, torch.log10, torch.exp2, torch.erf, torch.erfc),
)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


#: By kind of finding: a program with the fault, and one without it.
PAIRS: dict[str, tuple[Program, Program]] = {
    kind: (
        planted(faulty, kind, may_find=may_find, needs_cuda=needs_cuda, alone=kind == "code-loading"),
        Program(correct, needs_cuda=needs_cuda, alone=kind == "code-loading"),
    )
    for kind, needs_cuda, may_find, faulty, correct in (
        (
            "synchronous-copy", True, (),
            lambda: (Uploading("cudaMemcpy"), channels_last_input()),
            lambda: (Uploading("cudaMemcpyAsync", _stream()), channels_last_input()),
        ),
        (
            "garbage-collection", False, (),
            lambda: (Collecting(), channels_last_input()),
            lambda: (ChannelsLast(), channels_last_input()),
        ),
        (
            "code-loading", False, ("jitter",),
            lambda: (Loading(*RARE), channels_last_input()),
            lambda: (Loading(torch.sin), channels_last_input()),
        ),
        (
            "jitter", False, (),
            lambda: (Pausing(every=10), channels_last_input()),
            lambda: (Pausing(every=1), channels_last_input()),
        ),
        ("layout-transposes", False, (), _contiguous, lambda: (ChannelsLast(), channels_last_input())),
        (
            "dtype-casts", False, (),
            lambda: (Casting(torch.float16), wide_input().half()),
            lambda: (Casting(torch.float32), wide_input()),
        ),
        (
            "tf32-off", False, ("fusible-heads",),
            lambda: multiplying(torch.float32),
            lambda: multiplying(torch.float16),
        ),
    )
}  # fmt: skip
PROGRAMS = {
    **{f"planted_{kind.replace('-', '_')}": faulty for kind, (faulty, _) in PAIRS.items()},
    **{f"correct_without_{kind.replace('-', '_')}": correct for kind, (_, correct) in PAIRS.items()},
}
