"""``measure``: times of runners that take turns to answer for the same batches."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..runners.runner import Runner
from .deadline import Deadline

#: Passes through the batches at least, of which chance lets one runner win all once in 256; and requests of each.
_LEAST_PASSES = 8
_LEAST_REQUESTS = 40
_WARM_UP_PASSES = 2


class PassTimes(NamedTuple):
    """Mean time of a request in each pass through the batches of the example, in microseconds; one number a pass."""

    host: list[float]
    """From the call, on an idle device, until the answer is there."""
    device: list[float]
    """Among requests that follow back to back."""


def least_requests(batches: int) -> int:
    """Return the requests to one runner that measuring it on so many batches takes at least."""
    return (_LEAST_PASSES + _WARM_UP_PASSES) * (2 * batches + 1)


def measure(runners: Mapping[str, Runner], batches: Sequence[Tensor], deadline: Deadline) -> dict[str, PassTimes]:
    """Time passes through the batches, the runners taking turns in an order that rotates.

    A pass of a runner sends every batch from an idle device and waits for its answer, then all of them back to back.
    Where samples leave early some batches take long and others do not; their mean is what a request costs. After the
    deadline no more passes are begun than a choice needs.
    """
    with torch.cuda.device_of(batches[0]):  # events and streams are those of the current one
        return _measure(runners, batches, deadline)


def _measure(runners: Mapping[str, Runner], batches: Sequence[Tensor], deadline: Deadline) -> dict[str, PassTimes]:
    names = list(runners)
    device = batches[0].device
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = {name: PassTimes([], []) for name in names}
    for turn in range(-_WARM_UP_PASSES, max(_LEAST_PASSES, -(-_LEAST_REQUESTS // len(batches)))):
        if turn >= _LEAST_PASSES and deadline.left < 0:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runner = runners[name]
            runner(batches[-1])  # so that the L2 cache is as this runner leaves it
            waited = 0.0
            for x in batches:
                torch.cuda.current_stream(device).synchronize()
                for each in runners.values():  # and not for the device: another thread may be capturing
                    each.wait_until_idle()
                began = time.perf_counter()
                runner(x)
                torch.cuda.current_stream(device).synchronize()
                waited += time.perf_counter() - began
            start.record()
            for x in batches:
                runner(x)
            end.record()
            end.synchronize()
            if turn >= 0:
                times[name].host.append(waited * 1e6 / len(batches))
                times[name].device.append(start.elapsed_time(end) * 1e3 / len(batches))
    return times
