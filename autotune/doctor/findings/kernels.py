"""Findings of kernels that need not run, or not for so long: transposes, casts, float32 without tensor cores."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from ...records.intervals import length
from ..trace import Trace, TracedRequest, Work
from .finding import Finding, found, marks_of, short_name, times, us
from .requests import intervals, where_any

#: Kernels that take less of a request's time on the device, or fewer microseconds, are no finding.
_LEAST_SHARE, _LEAST_US = 0.1, 5.0
#: cuDNN's transposes; what only folds channels stays where it is.
_TRANSPOSE = re.compile(r"\b(nchwToNhwc|nhwcToNchw)Kernel\b")
#: PyTorch's copies that convert: those of their own, and any whose loads and stores take a dtype.
_CAST = re.compile(
    r"\bb?float\d+\w*_copy_kernel_cuda|\bdirect_copy_kernel_cuda\b.*LoadWithCast|gpu_kernel_impl<[^(]*\bdirect_copy_kernel"
)
#: Matrix products and convolutions of float32, accumulated without tensor cores, in names of cuBLAS and cuDNN.
_FLOAT32 = re.compile(r"_f32f32_f32f32_f32_|(?<![a-z])sgemm|simt_s(fprop|dgrad|wgrad)|scudnn")
_NO_FLOAT32 = re.compile("__half|fp16|bf16|bfloat16|tensorop|tf32")
_CONVOLUTION = re.compile("fprop|dgrad|wgrad|convolve|scudnn|winograd")
#: Compute capability from which on there is TF32.
_FIRST_WITH_TF32 = 8
#: What TF32 saves of these at least, where they are bound by arithmetic: an H200 multiplies seven times as fast.
_TF32_SHARE = 0.5


def find_transposes(trace: Trace) -> Iterator[Finding]:
    """Find cuDNN's transposes between NCHW and NHWC, in most requests."""
    kernels = _Kernels(trace, lambda work: _TRANSPOSE.search(work.name) is not None)
    yield from kernels.finding("layout-transposes", "cuDNN transposes what convolutions read or write")


def find_casts(trace: Trace) -> Iterator[Finding]:
    """Find PyTorch's copies that convert to another dtype, in most requests."""
    kernels = _Kernels(trace, lambda work: _CAST.search(work.name) is not None)
    yield from kernels.finding("dtype-casts", "Copies convert tensors to another dtype")


def find_float32(trace: Trace) -> Iterator[Finding]:
    """Find float32 multiplied without tensor cores where a live run knows that TF32 is off, on a GPU that has it."""
    families = trace.seen.without_tf32
    with_tf32 = {
        device.get("id", 0)
        for device in trace.devices
        if isinstance(major := device.get("computeMajor"), int) and major >= _FIRST_WITH_TF32
    }

    def counts(work: Work) -> bool:
        if _FLOAT32.search(work.name) is None or _NO_FLOAT32.search(work.name) or work.device not in with_tf32:
            return False
        return ("convolution" if _CONVOLUTION.search(work.name) else "matmul") in families

    kernels = _Kernels(trace, counts)
    words = {"matmul": "matrix products", "convolution": "convolutions"}
    off = " and ".join(words[family] for family in families if family in words)
    yield from kernels.finding(
        "tf32-off",
        f"TF32 is off for {off}, which multiply float32 without tensor cores",
        _TF32_SHARE,
        "cost: half of their time, which TF32 saves at least where arithmetic takes it",
    )


class _Kernels:
    """Kernels of one sort, in all requests of a trace."""

    def __init__(self, trace: Trace, belongs: Callable[[Work], bool]) -> None:
        self._trace, self._belongs = trace, belongs

    def _of(self, request: TracedRequest) -> list[Work]:
        return [work for work in request.kernels if self._belongs(work)]

    def finding(self, kind: str, what: str, share: float = 1.0, remark: str = "") -> Iterator[Finding]:
        """Yield a finding that costs this share of their time, if that is long enough."""
        trace = self._trace
        taken_us = trace.median_us(lambda request: _us(self._of(request)))
        busy_us = trace.median_us(lambda request: length(intervals(request.work)))
        if taken_us < max(_LEAST_US, _LEAST_SHARE * busy_us):
            return
        shown = where_any(trace, self._of)
        names = Counter(short_name(work) for work in shown)
        yield found(
            kind,
            f"{what}: {us(taken_us)} of the {us(busy_us)} that the device works.",
            [
                *(
                    f"{name} {times(count)} a request, {us(_us(work for work in shown if short_name(work) == name))}"
                    for name, count in names.most_common(3)
                ),
                *([remark] if remark else []),
            ],
            share * taken_us,
            (work.call.line for work in shown if work.call is not None),
            marks_of(self._of(trace.shown)),
        )


def _us(kernels: Iterable[Work]) -> float:
    return sum(work.us for work in kernels)
