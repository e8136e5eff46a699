"""Times variants in turns on a CUDA device, so that a drifting clock or a busy host touches all of them alike."""

import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

#: Fresh graphs of whatever is timed in one.
CAPTURES = 5
#: Rounds of each capture in measurements that decide between variants.
FINAL_ROUNDS = 20
#: Facts of every measurement made with these timers, as records keep them.
PROTOCOL = {"order": "interleaved, shuffled every round", "l2": "warm, by the variant itself", "clocks": "as found"}

Key = TypeVar("Key", bound=Hashable)
#: A variant as it is timed, and the result of a timer.
Timed = TypeVar("Timed")
Times = TypeVar("Times")


class VariantFailed(RuntimeError):
    """A variant raised while it was timed; the error itself is the cause."""

    def __init__(self, name: Any) -> None:
        super().__init__(str(name))
        self.name = name


class Samples(NamedTuple):
    """Timed calls of one variant in microseconds: [captures][calls]."""

    device: list[list[float]]
    """Device time of one call when calls follow back to back."""
    host: list[list[float]]
    """Wall time of one request, from an idle device until the caller's stream has the answer."""
    call: list[list[float]]
    """The part of ``host`` until the call returns, which is earlier unless the call waits for the device."""


class _Events:
    """Two events on the current stream, and the clock of the host."""

    def __init__(self) -> None:
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def request(self, call: Callable[[Tensor], object], x: Tensor) -> tuple[float, float]:
        """Return the wall time of a call until it returns, and until its answer is there."""
        began = time.perf_counter()
        kept = call(x)
        returned = time.perf_counter()
        self._end.record()
        self._end.synchronize()
        answered = time.perf_counter()
        del kept  # freed outside the timed part
        return (returned - began) * 1e6, (answered - began) * 1e6

    def back_to_back(self, call: Callable[..., object], *arguments: Tensor, repeat: int) -> float:
        """Return the device time of one call, after one that keeps the device busy while the next is launched."""
        call(*arguments)
        self._start.record()
        for _ in range(repeat):
            call(*arguments)
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / repeat


@contextmanager
def _naming(name: Any) -> Iterator[None]:
    """Say which variant raised."""
    try:
        yield
    except Exception as error:
        raise VariantFailed(name) from error


def time_those_that_run(
    variants: dict[Key, Timed],
    timed: Callable[[Mapping[Key, Timed]], Times],
    failed: Callable[[Key, Timed, BaseException], None],
) -> Times | None:
    """Time variants by calling ``timed``; one that raises is removed, ``failed`` is told, and the rest begins again.

    Returns what ``timed`` returns; None if no variant is left.
    """
    while variants:
        try:
            return timed(variants)
        except VariantFailed as failure:
            failed(failure.name, variants.pop(failure.name), failure.__cause__ or failure)
    return None


def time_captures(
    variants: Mapping[str, Sequence[Callable[[Tensor], object]]],
    inputs: Sequence[Tensor],
    *,
    rounds: int,
    warm_up: int,
    repeat: int,
    requests: int = 1,
) -> dict[str, Samples]:
    """Time variants against each other on a CUDA device, each of them in several fresh captures that take turns.

    In every round each variant is called with the same input: ``requests`` times from an idle device for the host
    time, then ``repeat`` times back to back between two events for the device time, after one more call that keeps
    the device busy while the first of them is launched. An untimed call goes before, so that the L2 cache is as the
    variant itself leaves it (warm), whichever variant was there before. The next round takes the next input and the
    next capture of each variant, in another order. Clocks are as found.

    Args:
        variants: by name, the captures of each; they join their streams to the caller's.
        inputs: all on one CUDA device.
        rounds: of each variant, over all its captures.
        warm_up: untimed rounds before.
        repeat: calls between the two events.
        requests: calls from an idle device, each timed by itself.

    Raises:
        VariantFailed: a call raised.
    """
    names, events, order = list(variants), _Events(), random.Random(0)
    samples = {
        name: Samples([[] for _ in calls], [[] for _ in calls], [[] for _ in calls]) for name, calls in variants.items()
    }
    for turn in range(-warm_up, rounds):
        x = inputs[turn % len(inputs)]
        for name in order.sample(names, len(names)):
            capture = turn % len(variants[name])
            call = variants[name][capture]
            with _naming(name):
                call(x)
                torch.cuda.synchronize(x.device)
                waited = [events.request(call, x) for _ in range(requests)]
                device_us = events.back_to_back(call, x, repeat=repeat)
            if turn >= 0:
                samples[name].host[capture] += [answered for _, answered in waited]
                samples[name].call[capture] += [returned for returned, _ in waited]
                samples[name].device[capture].append(device_us)
    return samples


def time_rounds(
    variants: Mapping[Key, Sequence[Callable[[], object]]], device: torch.device, *, rounds: int, repeat: int
) -> dict[Key, list[list[float]]]:
    """Time all captures of all variants in every round, after one that is not timed; see ``time_captures``.

    Returns:
        By variant, device time of one call in microseconds: [captures][rounds].

    Raises:
        VariantFailed: a call raised.
    """
    events, order = _Events(), random.Random(0)
    calls = [(name, index, call) for name, captures in variants.items() for index, call in enumerate(captures)]
    found: dict[Key, list[list[float]]] = {name: [[] for _ in captures] for name, captures in variants.items()}
    for turn in range(-1, rounds):
        for name, index, call in order.sample(calls, len(calls)):
            with _naming(name):
                torch.cuda.synchronize(device)
                device_us = events.back_to_back(call, repeat=repeat)
            if turn >= 0:
                found[name][index].append(device_us)
    return found
