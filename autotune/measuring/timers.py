"""A small interleaved timer: variants take turns, so that a drifting clock or a busy host touches them alike."""

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

#: Fresh graphs of whatever is timed in one.
CAPTURES = 5
#: Rounds of each capture of what decides between variants.
FINAL_ROUNDS = 20


Key = TypeVar("Key", bound=Hashable)


class VariantFailed(RuntimeError):
    """A variant raised while it was timed; the error itself is the cause."""

    def __init__(self, name: Any) -> None:
        super().__init__(str(name))
        self.name = name


class Samples(NamedTuple):
    """Timed calls of one variant in microseconds, capture by capture."""

    device: list[list[float]]
    """What one call takes on the device when calls follow back to back."""
    host: list[list[float]]
    """Wall time of one request, from an idle device until the caller's stream has the answer."""


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
    names = list(variants)
    device = inputs[0].device
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    samples = {name: Samples([[] for _ in calls], [[] for _ in calls]) for name, calls in variants.items()}
    order = random.Random(0)
    for turn in range(-warm_up, rounds):
        x = inputs[turn % len(inputs)]
        for name in order.sample(names, len(names)):
            capture = turn % len(variants[name])
            call = variants[name][capture]
            host_us = []
            try:
                call(x)
                torch.cuda.synchronize(device)
                for _ in range(requests):
                    began = time.perf_counter()
                    kept = call(x)
                    end.record()
                    end.synchronize()
                    host_us.append((time.perf_counter() - began) * 1e6)
                    del kept  # freed outside the timed part
                call(x)
                start.record()
                for _ in range(repeat):
                    call(x)
                end.record()
                end.synchronize()
            except Exception as error:
                raise VariantFailed(name) from error
            if turn >= 0:
                samples[name].host[capture] += host_us
                samples[name].device[capture].append(start.elapsed_time(end) * 1e3 / repeat)
    return samples


def time_rounds(
    variants: Mapping[Key, Sequence[Callable[[], object]]], device: torch.device, *, rounds: int, repeat: int
) -> dict[Key, list[list[float]]]:
    """Time all captures of all variants in every round, in another order each time; see ``time_captures``.

    Args:
        variants: of each its captures, which join their streams to the current one.
        device: a CUDA device.
        rounds: of each capture; one more is not timed.
        repeat: calls between two events, back to back.

    Returns:
        Of each variant what one call takes on the device, microseconds: [captures][rounds].

    Raises:
        VariantFailed: a call raised.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    calls = [(name, place, call) for name, captures in variants.items() for place, call in enumerate(captures)]
    found: dict[Key, list[list[float]]] = {name: [[] for _ in captures] for name, captures in variants.items()}
    order = random.Random(0)
    for turn in range(-1, rounds):
        for name, place, call in order.sample(calls, len(calls)):
            try:
                torch.cuda.synchronize(device)
                call()
                start.record()
                for _ in range(repeat):
                    call()
                end.record()
                end.synchronize()
            except Exception as error:
                raise VariantFailed(name) from error
            if turn >= 0:
                found[name][place].append(start.elapsed_time(end) * 1e3 / repeat)
    return found
