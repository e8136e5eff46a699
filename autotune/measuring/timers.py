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
#: Replays back to back of a head, or of a network with its heads, last about this long, microseconds.
BLOCK_US = 500.0
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


def time_request(call: Callable[..., object], *arguments: Tensor, wait: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time of a call until it returns, and until ``wait`` says that its answer is there; in us."""
    began = time.perf_counter()
    kept = call(*arguments)
    returned = time.perf_counter()
    wait()
    answered = time.perf_counter()
    del kept  # freed outside the timed part
    return (returned - began) * 1e6, (answered - began) * 1e6


def time_captures(
    variants: Mapping[Key, Sequence[Callable[..., object]]],
    inputs: Sequence[Tensor] = (),
    *,
    device: torch.device | None = None,
    rounds: int,
    warm_up: int = 1,
    repeat: int,
    requests: int = 1,
) -> dict[Key, Samples]:
    """Time variants against each other on a CUDA device, each of them in several fresh captures that take turns.

    In every round each variant is called ``requests`` times from an idle device for the host time, then ``repeat``
    times back to back between two events for the device time, after one more call that keeps the device busy while the
    first of them is launched. An untimed call goes before, so that the L2 cache is as the variant itself leaves it
    (warm), whichever variant was there before. Variants come in another order each round. Clocks are as found.

    With ``inputs``, each round takes the next input and the next capture of each variant; without, calls take nothing,
    and all captures are called in each round.

    Args:
        variants: by name, the captures of each; they join their streams to the caller's.
        inputs: all on one CUDA device.
        device: that of the inputs, if there are none.
        rounds: of each variant, over all its captures; without inputs of each capture.
        warm_up: untimed rounds before.
        repeat: calls between the two events.
        requests: calls from an idle device, each timed by itself.

    Raises:
        VariantFailed: a call raised.
    """
    device = inputs[0].device if inputs else device
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    order = random.Random(0)
    samples = {name: Samples([[] for _ in one], [[] for _ in one], [[] for _ in one]) for name, one in variants.items()}

    def answered() -> None:
        end.record()
        end.synchronize()

    every = [(name, index) for name, captures in variants.items() for index in range(len(captures))]
    for turn in range(-warm_up, rounds):
        given = [inputs[turn % len(inputs)]] if inputs else []
        turns = [(name, turn % len(captures)) for name, captures in variants.items()] if inputs else every
        for name, index in order.sample(turns, len(turns)):
            call = variants[name][index]
            with _naming(name):
                if requests:
                    call(*given)
                torch.cuda.synchronize(device)
                waited = [time_request(call, *given, wait=answered) for _ in range(requests)]
                call(*given)
                start.record()
                for _ in range(repeat):
                    call(*given)
                answered()
            if turn >= 0:
                samples[name].host[index] += [us for _, us in waited]
                samples[name].call[index] += [us for us, _ in waited]
                samples[name].device[index].append(start.elapsed_time(end) * 1e3 / repeat)
    return samples


def time_rounds(
    variants: Mapping[Key, Sequence[Callable[[], object]]], device: torch.device, *, rounds: int, repeat: int
) -> dict[Key, list[list[float]]]:
    """Return by variant the device time of one call in microseconds, [captures][rounds]; see ``time_captures``."""
    found = time_captures(variants, device=device, rounds=rounds, repeat=repeat, requests=0)
    return {name: samples.device for name, samples in found.items()}


def block_length(one: Mapping[Key, Sequence[Callable[[], object]]], device: torch.device, least: int = 1) -> int:
    """Return how many calls of the first capture of one variant last about ``BLOCK_US``, ``least`` at least."""
    ((name, (call, *_)),) = one.items()
    ((us,),) = time_rounds({name: [call]}, device, rounds=2, repeat=2).values()
    return max(least, round(BLOCK_US / min(us)))
