"""Which multiprocessors (SMs) a trunk leaves free, and for how long: measured by tiny programs that take what is left.

Launches of as many programs of one warp as the GPU holds run one after another on the low-priority stream, from before
the trunk begins until after its end. Each program keeps a place for about a microsecond, and records where and when.
Where the trunk is, fewer of them find room than on an idle GPU, and that share is what is reported. In one launch of
very many programs each would take the place of the one before, and blocks of the trunk that want the room of several
would wait for the last of them, whatever their priority.

It shows where there is room for programs of one warp, few registers and no shared memory. It does not show room for a
head's larger programs, nor how busy the trunk's warps are that are there. And it disturbs: blocks of the trunk wait for
programs that are in their place, at most for as long as these stay; ``stretch`` says what that came to.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...model.streams import stream_pair

#: For how long each program keeps its place, nanoseconds: 30 ticks of an H200's clock.
HOLD_NS = 1000
#: Parts of the trunk's time that room is told of.
PARTS = 20
#: Programs of one warp on an SM, at most.
_PLACES = 32
#: Launches of the probe that end before the trunk begins.
_LEAD = 20
#: What the trunk takes beside the probe at most, in times of what it takes alone, and for starting.
_MOST_STRETCH, _START_US = 3.0, 100.0
#: What the host has for launching the trunk while the device waits, microseconds: of each attempt, until the probe was
#: there all the time. A busy host may be late, and the trunk takes long where other processes use the GPU.
_HOST_US = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Room(NamedTuple):
    """What a trunk leaves free: shares of the programs that the idle GPU holds at a time."""

    by_sm: list[float]
    """Over the time of the trunk, by SM."""
    by_time: list[float]
    """Over all SMs, in ``PARTS`` parts of the trunk's time."""
    idle_programs: float
    """That an SM of the idle GPU holds at a time, as a mean: fewer than 32, since there are pauses between launches."""
    stretch: float
    """What the trunk takes beside the probe, over what it takes alone."""


def probe_trunk(trunk: Callable[[], object], trunk_us: float, device: torch.device) -> Room:
    """Run a trunk beside the probe.

    Args:
        trunk: replays its graph, captured on a stream of high priority, on the current stream.
        trunk_us: what it takes alone, microseconds.
        device: a CUDA device.

    Raises:
        ValueError: the probe ended before the trunk did, every time.
    """
    from ...kernels.trunk_probe_kernel import launch_trunk_probe  # there is no Triton for some platforms

    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    launches = _LEAD + int(1e3 * (_START_US + _MOST_STRETCH * trunk_us) / HOLD_NS)
    streams = stream_pair(device)
    turns = torch.zeros(launches, _PLACES * sm_count, 3, dtype=torch.int64, device=device)
    marks = torch.zeros(2, 3, dtype=torch.int64, device=device)
    wait = torch.zeros(1, 3, dtype=torch.int64, device=device)
    probe, there = torch.cuda.CUDAGraph(), torch.cuda.Event(external=True)
    with torch.cuda.stream(streams.trunk):  # compiles, loads and allocates, lest the host wait for the probe to end
        for rows in (turns[0], wait, marks[:1], marks[1:]):  # two kernels: they are aligned differently
            launch_trunk_probe(rows, 0)
        trunk()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(probe, stream=streams.side):
        for place, rows in enumerate(turns):
            if place == _LEAD:
                there.record()
            launch_trunk_probe(rows, HOLD_NS)
    with torch.cuda.stream(streams.side):
        probe.replay()
        idle = turns.clone()
    span = (0, 0)
    for host_us in _HOST_US:
        torch.cuda.synchronize(device)
        with torch.cuda.stream(streams.side):
            launch_trunk_probe(wait, 1000 * host_us)
            probe.replay()
        with torch.cuda.stream(streams.trunk):
            there.wait()
            launch_trunk_probe(marks[:1], 0)
            trunk()
            launch_trunk_probe(marks[1:], 0)
        torch.cuda.synchronize(device)
        span = (int(marks[0, 2]), int(marks[1, 1]))
        if _covers(turns.flatten(0, 1), span):
            break
    return room(idle.flatten(0, 1), turns.flatten(0, 1), span, trunk_us, sm_count)


def room(idle: Tensor, beside: Tensor, span: tuple[int, int], trunk_us: float, sm_count: int) -> Room:
    """Compare what the probe recorded beside a trunk with what it did on an idle GPU.

    Args:
        idle: [programs, 3] int64, see :class:`~auxhead.kernels.residency.Residency`.
        beside: the same beside the trunk.
        span: when the trunk ran, nanoseconds of the same clock.
        trunk_us: what it takes alone, microseconds.
        sm_count: SMs of the device.

    Raises:
        ValueError: the probe did not run all the time that the trunk did.
    """
    begin, end = span
    if not _covers(beside, span):
        raise ValueError("beside: the probe began after the trunk or ended before it, wants programs all the time")
    first, last = int(idle[:, 1].min()), int(idle[:, 2].max())
    quarter = (last - first) // 4  # neither while it starts nor while it ends
    usual = float(_programs(idle, (first + quarter, last - quarter), sm_count).mean())
    edges = [begin + (end - begin) * part // PARTS for part in range(PARTS + 1)]
    by_time = [float(_programs(beside, window, sm_count).mean()) for window in zip(edges, edges[1:], strict=False)]
    by_sm = _programs(beside, span, sm_count) / usual
    return Room(by_sm.tolist(), [one / usual for one in by_time], usual, (end - begin) / 1e3 / trunk_us)


def _covers(turns: Tensor, span: tuple[int, int]) -> bool:
    """Return whether programs were there from before a span until after it."""
    begin, end = span
    return int(turns[:, 1].min()) <= begin and int(turns[:, 2].max()) >= end


def _programs(turns: Tensor, window: tuple[int, int], sm_count: int) -> Tensor:
    """Return how many programs were there at a time, as a mean over a window, by SM: [SMs] float64."""
    begin, end = window
    inside = (turns[:, 2].clamp(max=end) - turns[:, 1].clamp(min=begin)).clamp(min=0).double()
    total = torch.zeros(sm_count, dtype=torch.float64, device=turns.device)
    return total.index_add(0, turns[:, 0], inside).cpu() / (end - begin)
