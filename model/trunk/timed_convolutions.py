"""Times on the device: those by which cuDNN chooses among its convolutions, and Triton's are chosen among others'."""

import hashlib
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..basics.streams import OwnedLock

#: Samples of a batch from which on cuDNN's algorithms are timed.
LEAST_TIMED_BATCH = 16
#: Calls that are timed at once, how often that is done, and cycles that no GPU makes more of in a second.
_TIMED_CALLS, _TIMED_ROUNDS, _CYCLES_A_SECOND = 4, 3, 3e9
#: A fused convolution has to agree with the plain one this well, relative to the largest output; the trunk as a
#: whole is checked much more strictly.
COARSE_TOLERANCE = 2**-5
#: Products, at most, of which a convolution is Triton's where nothing is timed: of one image cuDNN is sooner for hardly
#: any with fewer (of 591 convolutions of nine networks, H200).
MOST_UNTIMED_PRODUCTS = 2**26
#: Whether one call takes no longer than another, by a digest of all that decides it: so are all trunks of a process
#: made alike.
_is_sooner: dict[str, bool] = {}
#: Who has cuDNN time its algorithms just now, and the user's own setting: ``cudnn.benchmark`` is one for all threads.
_timing: set[object] = set()
_before = False
_SETTING = OwnedLock()


@contextmanager
def fastest_convolutions(samples: int) -> Iterator[None]:
    """Let cuDNN time its algorithms for each convolution of a batch that is new to this thread, and keep the fastest.

    Later ones of the same sizes take the same algorithm. Small batches are left to cuDNN's rules: timed alone,
    convolutions cut into several launches look faster than they are one after another (on an H200 ResNet-18 takes 170
    us at batch 1 with them and 160 without; at 32, 457 with what is timed and 503 without). And where PyTorch is asked
    to be deterministic nothing is timed.
    """
    global _before
    cudnn = torch.backends.cudnn
    if samples < LEAST_TIMED_BATCH or times_nothing():
        yield
        return
    this = object()
    try:
        with _SETTING:
            if not _timing:
                _before = cudnn.benchmark
            _timing.add(this)
            cudnn.benchmark = True
        yield
    finally:
        with _SETTING:
            if this in _timing:
                _timing.remove(this)
                if not _timing:
                    cudnn.benchmark = _before


def times_nothing() -> bool:
    """Return whether PyTorch is asked to be deterministic: two processes might find different things the fastest."""
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def prefers_triton(
    compiled: Hashable, call: Callable[[], Tensor], expected: Tensor, others: Callable[[], Tensor], kind: Hashable,
    count: int | None,
) -> bool:  # fmt: skip
    """Return whether a call of Triton gives what is expected, coarsely, and takes no longer than what others launch.

    Args:
        compiled: all that it is compiled for.
        call: the call.
        expected: as plain operations compute it.
        others: what would be launched instead.
        kind: all else on which the times depend.
        count: products of it, by which it is chosen where nothing is timed; None if it always is.
    """
    try:
        error = off_by(call(), expected)
    except Exception:  # of a compiler, for a GPU that it knows less well
        return False
    if error is not None or count is None:
        return error is None
    if times_nothing():
        return count <= MOST_UNTIMED_PRODUCTS
    decides = compiled, kind, expected.stride()
    return asked_once(decides, lambda: takes_no_longer(call, others, expected), expected.device)


class Answers(NamedTuple):
    """Answers of what takes no longer: trunks of the next process are made as those of the one that timed."""

    known: Mapping[str, bool]
    """Of another process, by digests of all that decides them."""
    used: dict[str, bool]
    """All that trunks were made by so far."""


_answers: ContextVar[Answers | None] = ContextVar("answers", default=None)


def asked_once(decides: Hashable, ask: Callable[[], bool], device: torch.device) -> bool:
    """Return what asking gives on a device, gave the first time, or is known of another process.

    What ``decides`` it has to look alike in all processes.
    """
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    where = gpu and (gpu.name, gpu.multi_processor_count)
    settings = torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark  # by which cuDNN chooses
    key = hashlib.sha256(repr((where, settings, decides)).encode()).hexdigest()[:16]
    answers = _answers.get()
    known = None if answers is None else answers.known.get(key)
    if known is None:
        known = _is_sooner.get(key)
    if known is None:
        known = _is_sooner.setdefault(key, ask())  # another thread may have asked meanwhile
    if answers is not None:
        answers.used[key] = known
    return known


@contextmanager
def keeping_answers(known: Mapping[str, bool]) -> Iterator[dict[str, bool]]:
    """Time nothing in this context of which another process has the answer; yields all answers that are used in it.

    Two processes might find different things the faster of two alike, and what one has compiled the other would not
    find.
    """
    answers = Answers(known, {})
    token = _answers.set(answers)
    try:
        yield answers.used
    finally:
        _answers.reset(token)


def off_by(found: Tensor, plain: Tensor) -> float | None:
    """Return by how much a fused convolution is off, None if it is that of plain operations, coarsely."""
    lies = [[step for size, step in zip(each.shape, each.stride(), strict=True) if size > 1] for each in (found, plain)]
    if not plain.numel() or found.shape != plain.shape or lies[0] != lies[1]:
        return math.inf
    error = (found.float() - plain.float()).abs().max().item()
    return None if error <= COARSE_TOLERANCE * plain.float().abs().max().item() else error


def takes_no_longer(call: Callable[[], Any], other: Callable[[], Any], x: Tensor, at_most: float = 1.0) -> bool:
    """Return whether a call takes the device of ``x`` at most so many times as long as another; CPUs are not timed."""
    if x.device.type != "cuda":
        return True
    calls = call, other
    with torch.cuda.device_of(x):
        for each in calls:
            each()  # which is slow the first time
        began = time.perf_counter()
        for each in calls:
            _device_ms(each, 0)
        cycles = int((time.perf_counter() - began) * _CYCLES_A_SECOND)
        times = zip(*([_device_ms(each, cycles) for each in calls] for _ in range(_TIMED_ROUNDS)), strict=True)
    mine, others = map(min, times)
    return mine <= at_most * others


def _device_ms(call: Callable[[], Any], cycles: int) -> float:
    """Return milliseconds of some calls, behind what holds the device up, so that it does not wait for the host."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)
    start.record()
    for _ in range(_TIMED_CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
