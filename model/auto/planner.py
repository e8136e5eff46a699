"""The planner: for one batch size the fastest runner, measured on the user's own samples or remembered."""

import datetime
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from ..runners.graph_runner import GraphRunner
from ..runners.overlapped import OverlappedRunner
from ..spread import spread
from .candidates import Candidate, candidates
from .choice import choose
from .plan import CandidateTimes, Plan
from .plan_key import exits_of, plan_key, shares_of
from .plan_store import remember_plan, remembered_plan

#: Different batches of the example that a measurement goes through.
_BATCHES = 16
#: Passes through them at least, of which chance lets one runner win all once in 256; and requests of each runner.
_LEAST_PASSES = 8
_LEAST_REQUESTS = 40
_WARM_UP_PASSES = 2


class PassTimes(NamedTuple):
    """What a request takes, in microseconds, averaged over the batches of a pass; one number a pass."""

    host: list[float]
    device: list[float]


def make_planned(
    network: EarlyExitNetwork, example_input: Tensor, size: int, smaller: Sequence[int], trunk: str, *, fresh: bool
) -> tuple[Plan, GraphRunner]:
    """Make the runner that a remembered plan names, or that a measurement now chooses, which is remembered.

    Args:
        network: that :func:`check_capturable` has passed.
        example_input: samples like those to come.
        size: the batch size.
        smaller: batch sizes that samples may be gathered into.
        trunk: see :func:`make_trunk`.
        fresh: measure anew whatever is remembered.

    Raises:
        RuntimeError: the plain graph cannot be captured.
    """
    batches = batches_of(example_input, size)
    exits = exits_of(network, batches)
    key = plan_key(network, batches, smaller, trunk, exits)
    plan = None if fresh or key is None else remembered_plan(key)
    if plan is not None:
        with suppress(RuntimeError, ValueError):  # there may be less memory than then; what can be made now is measured
            return plan, plan.chosen.make(network, example_input, size, smaller, trunk)
    plan, runner = measure_plan(network, example_input, batches, smaller, trunk, shares_of(exits, len(network.taps)))
    if key is not None:
        remember_plan(key, plan)
    return plan, runner


def measure_plan(
    network: EarlyExitNetwork,
    example_input: Tensor,
    batches: Sequence[Tensor],
    smaller: Sequence[int],
    trunk: str,
    shares: tuple[float, ...],
) -> tuple[Plan, GraphRunner]:
    """Make every candidate on one trunk, check it against the plain graph, measure them by turns and keep one."""
    size = len(batches[0])
    plain_runner = OverlappedRunner(network, example_input, batch_sizes=(size,), trunk=trunk)
    plain = Candidate("overlapped", plain_runner.forks[size])
    runners: dict[str, GraphRunner] = {}
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
        times={name: CandidateTimes(spread(passes.host), spread(passes.device)) for name, passes in times.items()},
        left_out=left_out,
        shares=shares,
        utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    return plan, runners[chosen]


def batches_of(example_input: Tensor, size: int) -> list[Tensor]:
    """Cut the example into batches of one size, filling a short one with its first samples again."""
    repeats = -(-size // len(example_input))
    samples = torch.cat([example_input] * repeats) if repeats > 1 else example_input
    return list(samples[: len(samples) // size * size].split(size))[:_BATCHES]


def _alike(runner: GraphRunner, plain: GraphRunner, batches: Sequence[Tensor]) -> bool:
    """Whether two runners of one trunk give the same labels and exits, rounding at a threshold apart: 1 in 100."""
    samples, differing = 0, 0
    for x in batches:
        found, wanted = runner(x), plain(x)
        differing += int(((found.label != wanted.label) | (found.exit_index != wanted.exit_index)).sum())
        samples += len(x)
    return differing <= samples // 100


def measure(runners: Mapping[str, GraphRunner], batches: Sequence[Tensor]) -> dict[str, PassTimes]:
    """Time passes through the batches, the runners taking turns in an order that rotates.

    A pass of a runner sends every batch from an idle device and waits for its answer, then all of them back to back.
    Where samples leave early some batches take long and others do not; their mean is what a request costs.
    """
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
                torch.cuda.synchronize(device)
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
