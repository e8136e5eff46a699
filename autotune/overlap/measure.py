"""Measures overlap on a GPU: times of trunk, heads and both without a profiler, then replays under it."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile as torch_profile

from ...kernels.launch.residency import Residency, recording
from ...model.trunk.timed_convolutions import fastest_convolutions
from ..measuring.captured import CHAIN
from ..measuring.cells import NEVER
from ..measuring.profiled_requests import activities, record_trace
from ..measuring.progress import Begins
from ..measuring.subject import Subject
from ..measuring.timers import CAPTURES, FINAL_ROUNDS, block_length, time_rounds
from ..records.comparison import compare
from ..records.summaries import Timings, summary
from .network_parts import BARE, BOTH, HEADS, NetworkParts
from .replays import TRUNK, RecordedReplay, Replay, read_replays, recorded_replay

#: Profiled replays of the bare trunk and of the whole network.
REPLAYS = 20


def paired_parts(trunk: Timings, heads: Timings, both: Timings) -> list[dict[str, Any]]:
    """Return the parts that records compare a network with, its trunk and its heads; see ``hiding_efficiency``."""
    stretch = compare(both, trunk)
    interval = {"device_ratio": stretch.median_ratio, "low": stretch.low, "high": stretch.high}
    return [
        {"role": BARE, "device_us": summary(trunk), **interval},
        {"role": HEADS, "device_us": summary(heads)},
    ]


@dataclass(frozen=True)
class OverlapMeasured:
    """Times and replays of one network."""

    times: dict[str, Timings]
    """Times by part, without a profiler and back to back: microseconds, [captures][rounds]."""
    profiled: dict[str, list[float]]
    """Times of the first captures of ``BARE`` and ``BOTH`` under the profiler: microseconds, [rounds]."""
    replays: dict[str, list[Replay]]
    """``REPLAYS`` replays of these captures in the profiler's trace, each from an idle device."""
    recorded: list[RecordedReplay]
    """``REPLAYS`` of a capture of ``BOTH`` whose heads record where their programs run."""
    forks: tuple[str, ...]
    """Taps after which launches of heads leave the trunk."""
    repeat: int
    """Calls back to back between two events."""
    notes: tuple[str, ...]
    """Changes made to the backbone, in sentences."""


def measure_overlap(subject: Subject, begins: Begins) -> OverlapMeasured:
    """Capture the parts of a network ``CAPTURES`` times each, check their answers, time and profile them.

    Everything is timed before anything is profiled: the profiler's hooks into CUDA outlive it.

    Raises:
        WrongAnswer: a capture answers wrongly; nothing is timed then.
        RuntimeError: whatever fails in a capture or a call, or the profiler loses replays.
    """
    example = subject.example
    with ExitStack() as opened, fastest_convolutions(len(example)), subject.exits(NEVER):
        begins("trunk", 0.1)
        parts = NetworkParts(subject, opened)
        calls: dict[str, list[Callable[[], object]]] = {}
        for index, name in enumerate((BARE, HEADS, BOTH)):
            begins(f"captures of {name}", 0.2 + 0.2 * index)
            calls[name] = [parts.capture(name) for _ in range(CAPTURES)]
        begins("timing", 0.8)
        repeat = block_length({BARE: calls[BARE]}, example.device, least=2)
        times = time_rounds(calls, example.device, rounds=FINAL_ROUNDS, repeat=repeat)
        chained = [[us / CHAIN for us in rounds] for rounds in times[HEADS]]
        begins("profiling", 0.9)
        traced = {name: calls[name][0] for name in (BARE, BOTH)}
        with recording() as launches:
            recorded = parts.capture(BOTH)
        with torch_profile(activities=activities(example)):
            under = {name: [call] for name, call in traced.items()}
            profiled = time_rounds(under, example.device, rounds=FINAL_ROUNDS, repeat=repeat)
        bare = _profiled_replays(BARE, traced[BARE], example)
        # all of it is the trunk's, whose own classifier runs in the heads' kernel
        bare = [tuple(one._replace(role=TRUNK) for one in replay) for replay in bare]
        return OverlapMeasured(
            times={**times, HEADS: chained},
            profiled={name: rounds for name, (rounds,) in profiled.items()},
            replays={BARE: bare, BOTH: _profiled_replays(BOTH, traced[BOTH], example)},
            recorded=_recorded_replays(recorded, launches, example),
            forks=parts.forks,
            repeat=repeat,
            notes=parts.trunk.notes,
        )


def _profiled_replays(name: str, call: Callable[[], object], example: Tensor) -> list[Replay]:
    with tempfile.TemporaryDirectory() as folder:
        trace = record_trace(lambda _x: call(), example, REPLAYS, Path(folder) / "trace.json")
    replays = read_replays(trace)
    if len(replays) != REPLAYS:
        raise RuntimeError(f"{name}: the profiler's trace holds {len(replays)} of {REPLAYS} replays")
    return replays


def _recorded_replays(
    call: Callable[[], object], launches: Sequence[Residency], example: Tensor
) -> list[RecordedReplay]:
    recordings: list[list[Residency]] = []

    def keep() -> None:
        call()
        # copied, for each replay writes them anew
        recordings.append([launch._replace(turns=launch.turns.to("cpu", copy=True)) for launch in launches])

    replays = _profiled_replays("recorded", keep, example)
    sm_count = torch.cuda.get_device_properties(example.device).multi_processor_count
    return [recorded_replay(replay, of, sm_count) for replay, of in zip(replays, recordings[-REPLAYS:], strict=True)]
