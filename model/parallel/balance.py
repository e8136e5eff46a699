"""Balance of a network's parts: times and bytes of its segments, measured one by one, and where parts begin by them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..basics.bad_input import BadInput
from ..runners.captures import Captures
from ..runners.graph_runner import GraphRunner
from ..runners.program import StaticInput, capture_program
from ..runners.segment_times import measure_segments
from .cut import Cut

_WARM_UPS, _RUNS = 2, 5


class Costs(NamedTuple):
    """What the segments of a network take on a device."""

    us: Mapping[int, Sequence[float]]
    """Microseconds by batch size, without heads; on a GPU those of a graph."""
    held: Sequence[int]
    """Bytes of each segment's parameters and buffers, those of its head with them."""
    at_work: Sequence[int]
    """Bytes that each takes besides for the largest batch: activations, workspaces, weights that a trunk folds."""

    def bytes_of(self, start: int, end: int) -> int:
        """Return the bytes that a part of consecutive segments takes: it works at one of them at a time."""
        return sum(self.held[start:end]) + max(self.at_work[start:end])


def check_cuttable(trunk: object) -> None:
    """Raise ``ValueError`` unless a backbone that is run so can be cut."""
    if trunk not in ("as_is", "cudnn"):
        raise ValueError(f"trunk: got {trunk!r}, wants 'as_is' or 'cudnn', which can be cut at the taps")


def measure(cut: Cut, batches: Mapping[int, Tensor], trunk: str) -> Costs:
    """Measure each segment alone, by copies that go again, on the device of the batches, of one size each.

    So no more than one segment is there at a time. What is on ``meta`` is measured with zeros in its place.
    """
    us: dict[int, list[float]] = {size: [] for size in batches}
    at_work = []
    for segment in range(cut.segments):
        batches, peak = _measure_one(cut, segment, batches, trunk, us)
        at_work.append(peak)
    return Costs(us, [cut.bytes_of(each, each + 1) for each in range(cut.segments)], at_work)


def _measure_one(
    cut: Cut, segment: int, batches: Mapping[int, Tensor], trunk: str, us: Mapping[int, list[float]]
) -> tuple[dict[int, Tensor], int]:
    """Add the times of a segment; returns what it hands over of each batch, and the most bytes that it took."""
    largest = batches[max(batches)]
    device, on_gpu = largest.device, largest.is_cuda
    own = {id(tensor): _copied(tensor, device) for _, tensor, _ in cut.read_by(segment, segment + 1)}
    before = torch.cuda.memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    ends_early = segment + 1 < cut.segments
    placed = cut.place(segment, segment + 1, own, largest, trunk)
    handed = {}
    with torch.no_grad():
        for size, x in batches.items():
            x = x.contiguous(memory_format=placed.trunk.memory_format)
            with placed.trunk.choosing(size):
                us[size].append(_graph_us(placed.trunk.module, x) if on_gpu else _host_us(placed.trunk.module, x))
                if ends_early:
                    handed[size] = placed.trunk.module(x).clone()
    return handed, torch.cuda.max_memory_allocated(device) - before if on_gpu else 0


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    copy = torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor.detach().to(device, copy=True)
    return torch.nn.Parameter(copy, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else copy


def _graph_us(module: torch.nn.Module, x: Tensor) -> float:
    captures = Captures(x.device, GraphRunner.trunk_priority)
    try:
        static, stream = StaticInput(x), captures.streams.trunk
        program = capture_program(lambda _cut: module(static.x), static, [static.x], stream, captures.memory, [module])
        (us,) = measure_segments(program.graphs, static.refill, stream)
        return us
    finally:
        captures.free_or_leave()


def _host_us(module: torch.nn.Module, x: Tensor) -> float:
    times = []
    for _ in range(_WARM_UPS + _RUNS):
        batch = x.clone(memory_format=torch.preserve_format)  # which it may change in place
        began = time.perf_counter()
        module(batch)
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times[_WARM_UPS:])


def starts_of(
    name: str, ends: str | Sequence[str], cut: Cut, limits: Sequence[int | None], kind: str, costs: Callable[[], Costs]
) -> list[int]:
    """Return the first segment of each part.

    Args:
        name: of the argument ``ends``, for errors.
        ends: the taps at which one part ends and the next begins; or "auto", by which the slowest part is as fast as
            can be with the parts within their limits.
        cut: of the network.
        limits: the bytes that each part may take; None: any number.
        kind: what has a part each ("ranks"), for errors.
        costs: measures the segments, for "auto", the first time.

    Raises:
        ValueError: another argument than that, or more parts than can be.
        BadInput: no part may end at a tap; two parts would share a parameter; or a part does not fit.
    """
    taps, parts = cut.network.taps, len(limits)
    whys = "".join(f"; not at {tap!r}: {why}" for tap, why in cut.uncuttable.items())
    if parts > 1 and not cut.ends:
        raise BadInput(
            f"network: no part of it can end at a tap{whys}; wants heads behind whole blocks, as attach does"
        )
    if parts > cut.segments:
        raise ValueError(f"{kind}: got {parts}, wants at most {cut.segments}, as parts can end at {cut.ends}{whys}")
    if isinstance(ends, str):
        if ends != "auto":
            raise ValueError(f"{name}: got {ends!r}, wants 'auto' or a list of taps")
        starts = balanced(costs(), limits)
        if starts is None:
            raise BadInput(_too_large(costs(), cut, limits, kind))
    else:
        if not isinstance(ends, Sequence):
            raise ValueError(f"{name}: got {ends!r}, wants 'auto' or a list of taps")
        given = [*ends]
        if len(given) != parts - 1 or given != [tap for tap in taps if tap in given]:
            raise ValueError(f"{name}: got {given}, wants {parts - 1} of {[*taps]}, in this order, for {parts} {kind}")
        for tap in given:
            if tap in cut.uncuttable:
                raise BadInput(f"{name}: no part can end at {tap!r}: {cut.uncuttable[tap]}")
        starts = [0, *(cut.ends.index(tap) + 1 for tap in given)]
    cut.check_parts(starts)
    return starts


def balanced(costs: Costs, limits: Sequence[int | None]) -> list[int] | None:
    """Return the first segment of each part, so that the slowest is as fast as can be; None if no way is in limits."""
    us, count, parts = costs.us[max(costs.us)], len(costs.held), len(limits)

    @cache
    def best(first: int, part: int) -> tuple[float, tuple[int, ...]] | None:
        """Return the time of the slowest part from this one on, and where they begin."""
        limit, ways = limits[part], []
        last = part == parts - 1
        for end in [count] if last else range(first + 1, count):
            later = (0.0, ()) if last else best(end, part + 1)
            if later is not None and (limit is None or costs.bytes_of(first, end) <= limit):
                ways.append((max(sum(us[first:end]), later[0]), (first, *later[1])))
        return min(ways, default=None)

    found = best(0, 0)
    return None if found is None else [*found[1]]


def _too_large(costs: Costs, cut: Cut, limits: Sequence[int | None], kind: str) -> str:
    names = [f"up to {tap!r}" for tap in cut.ends] + ["to the logits"]
    takes = ", ".join(f"{costs.bytes_of(each, each + 1) / 2**20:,.0f} MiB {names[each]}" for each in range(len(names)))
    have = ", ".join("any" if limit is None else f"{limit / 2**20:,.0f}" for limit in limits)
    return (
        f"network: does not fit on {len(limits)} {kind}, which may take {have} MiB: its segments take {takes}; wants "
        "more of them, heads at more taps, or a smaller batch"
    )


def described(cut: Cut, starts: Sequence[int], holders: Sequence[object], costs: Costs | None, size: int) -> list[str]:
    """Say of each part, in a sentence, where it begins and what it takes; ``holders`` have one each."""
    lines = []
    for number, (start, end) in enumerate(pairwise([*starts, cut.segments])):
        begins = f"behind {cut.ends[start - 1]}" if start else "from the input"
        ms = "" if costs is None else f", {sum(costs.us[size][start:end]) / 1000:.3g} ms for {size} samples"
        mib = cut.bytes_of(start, end) / 2**20
        lines.append(f"Part {number} on {holders[number]}, {begins}: {mib:,.1f} MiB{ms}.")
    return lines
