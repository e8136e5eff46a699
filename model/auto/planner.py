"""Measures every candidate runner for one batch size on the user's own samples, and keeps the chosen one."""

import datetime
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from ..runners.overlapped import OverlappedRunner
from ..runners.runner import Runner
from .candidates import Candidate, candidates
from .choice import choose
from .plan import PassTimes, Plan

#: Passes through the batches at least, of which chance lets one runner win all once in 256; and requests of each.
_LEAST_PASSES = 8
_LEAST_REQUESTS = 40
_WARM_UP_PASSES = 2


def measure_plan(
    network: EarlyExitNetwork,
    example_input: Tensor,
    batches: Sequence[Tensor],
    smaller: Sequence[int],
    trunk: str,
    shares: tuple[float, ...],
) -> tuple[Plan, Runner]:
    """Make every candidate on one trunk, check it against the plain graph, measure them by turns and keep one.

    The ``batches`` are cut from the example, all of one size; samples may be gathered into ``smaller`` ones. For
    ``shares`` see :class:`Plan`.

    Raises:
        RuntimeError: the plain graph cannot be captured.
    """
    size = len(batches[0])
    plain_runner = OverlappedRunner(network, example_input, batch_sizes=(size,), trunk=trunk)
    plain = Candidate("overlapped", plain_runner.forks[size])
    runners: dict[str, Runner] = {}
    left_out: dict[str, str] = {}
    chosen = None
    known = {candidate.name: candidate for candidate in candidates(network.taps, plain.forks, smaller)}
    try:
        for name, candidate in known.items():
            if candidate == plain:
                runners[name] = plain_runner
                continue
            try:
                runner = candidate.make(network, example_input, size, smaller, plain_runner.trunk)
            except RuntimeError as error:
                left_out[name] = str(error)
                continue
            if _alike(runner, plain_runner, batches):
                runners[name] = runner
            else:
                runner.close()
                left_out[name] = f"it answered otherwise than {plain.name}"
        times = measure(runners, batches)
        chosen = choose({name: passes.host for name, passes in times.items()}, plain.name)
    finally:
        for name, runner in {**runners, plain.name: plain_runner}.items():
            if name != chosen:
                runner.close()
    plan = Plan(
        chosen=known[chosen],
        plain=plain.name,
        times=times,
        left_out=left_out,
        shares=shares,
        utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    return plan, runners[chosen]


def _alike(runner: Runner, plain: Runner, batches: Sequence[Tensor]) -> bool:
    """Return whether two runners give the same labels and exits, but for 1 in 100 by rounding at a threshold."""
    samples, differing = 0, 0
    for x in batches:
        found, wanted = runner(x), plain(x)
        differing += int(((found.label != wanted.label) | (found.exit_index != wanted.exit_index)).sum())
        samples += len(x)
    return differing <= samples // 100


def measure(runners: Mapping[str, Runner], batches: Sequence[Tensor]) -> dict[str, PassTimes]:
    """Time passes through the batches, the runners taking turns in an order that rotates.

    A pass of a runner sends every batch from an idle device and waits for its answer, then all of them back to back.
    Where samples leave early some batches take long and others do not; their mean is what a request costs.
    """
    with torch.cuda.device_of(batches[0]):  # events and streams are those of the current one
        return _measure(runners, batches)


def _measure(runners: Mapping[str, Runner], batches: Sequence[Tensor]) -> dict[str, PassTimes]:
    names = list(runners)
    device = batches[0].device
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = {name: PassTimes([], []) for name in names}
    for turn in range(-_WARM_UP_PASSES, max(_LEAST_PASSES, -(-_LEAST_REQUESTS // len(batches)))):
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
