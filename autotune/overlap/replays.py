"""Replays of a captured network: kernels in order, from a torch.profiler trace, and programs that heads recorded."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...kernels.launch.residency import Residency
from ..measuring.cuda_calls import GRAPH_LAUNCHES, HEAD_KERNEL, PACK_KERNEL, plain_name

#: Role of kernels that are no launch of heads.
TRUNK = "trunk"
#: Role of head launches that run beside the trunk.
SIDE = "side"
#: Role of an overlapped network's last launch, which waits for trunk and heads: late heads, classifier, answer; and of
#: those that pack features for it.
JOIN = "join"


class Kernel(NamedTuple):
    """One kernel of a replay."""

    name: str
    role: str
    """``TRUNK``, ``SIDE`` or ``JOIN``."""
    stream: int
    """The profiler's number of the stream that the graph's executor ran it on."""
    start_us: float
    """Since the replay's first kernel began."""
    duration_us: float
    grid: tuple[int, ...] | None
    """Blocks in x, y and z; None if the trace does not say."""
    block: tuple[int, ...] | None
    """Threads in x, y and z."""
    registers: int | None
    """Registers of a thread."""

    @property
    def end_us(self) -> float:
        """End, since the replay's first kernel began."""
        return self.start_us + self.duration_us


#: The kernels of one replay, in the order in which they began.
Replay = tuple[Kernel, ...]


def read_replays(trace: Mapping[str, Any]) -> list[Replay]:
    """Return the replays of CUDA graphs in a Chrome trace of torch.profiler, in the order in which they began.

    Kernels of a replay are those that carry the correlation of one launch of a graph. Which of them are the heads' is
    told by name and order, not by stream: the trace names the streams on which the graph's executor ran its nodes,
    which need not be those of the capture, and no priorities.

    Args:
        trace: the content of the file. Each replay is one of an overlapped runner's graph, or of a bare trunk's.

    Raises:
        ValueError: no kernels, or none that a graph launched; says how to record a trace that has some.
    """
    made_by = "; `auxhead-tune overlap MODEL` records and reads one"
    launches: set[Any] = set()
    by_launch: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        launch = event.get("args", {}).get("correlation")
        if event.get("cat") == "kernel":
            by_launch[launch].append(event)
        elif event.get("cat") in ("cuda_runtime", "cuda_driver"):
            if plain_name(event["name"]) in GRAPH_LAUNCHES and launch is not None:
                launches.add(launch)
    if not by_launch:
        raise ValueError(
            "trace: got no GPU kernels, wants those of replays of a CUDA graph, profiled on a GPU with "
            f"ProfilerActivity.CUDA{made_by}"
        )
    replays = [kernels for launch, kernels in by_launch.items() if launch in launches]
    if not replays:
        count = sum(map(len, by_launch.values()))
        raise ValueError(
            f"trace: got {count} GPU kernels and none with the correlation of a cudaGraphLaunch, wants those of "
            f"replays of a CUDA graph{made_by}"
        )
    return [_replay(kernels) for kernels in sorted(replays, key=lambda events: min(float(one["ts"]) for one in events))]


def _replay(events: list[Mapping[str, Any]]) -> Replay:
    ordered = sorted(events, key=lambda event: (float(event["ts"]), float(event["dur"])))
    begin = float(ordered[0]["ts"])
    joining = len(ordered) - 1
    while joining > 0 and ordered[joining - 1]["name"].startswith(PACK_KERNEL):
        joining -= 1
    kernels = []
    for index, event in enumerate(ordered):
        arguments = event.get("args", {})
        role = TRUNK
        if event["name"].startswith((HEAD_KERNEL, PACK_KERNEL)):
            role = JOIN if index >= joining else SIDE
        kernels.append(
            Kernel(
                name=event["name"],
                role=role,
                stream=int(arguments.get("stream", event.get("tid", 0))),
                start_us=round(float(event["ts"]) - begin, 3),  # the profiler counts nanoseconds
                duration_us=round(float(event["dur"]), 3),
                grid=_sizes(arguments.get("grid")),
                block=_sizes(arguments.get("block")),
                registers=arguments.get("registers per thread"),
            )
        )
    return tuple(kernels)


def _sizes(found: Any) -> tuple[int, ...] | None:
    return None if found is None else tuple(int(size) for size in found)


class Program(NamedTuple):
    """A program of a head launch, or one of the pieces of work that it did."""

    launch: int
    """Index among the replay's launches that decide; the last is the joining one. Those that pack record nothing."""
    sm: int
    start_us: float
    """Since the replay's first kernel began, as the profiler tells the time."""
    end_us: float


class RecordedReplay(NamedTuple):
    """One replay: its kernels by the profiler, and the programs of its heads by their own recording."""

    replay: Replay
    programs: list[Program]
    """Programs of all launches of heads, by launch and then by start."""
    clocks_differ_us: float
    """Uncertainty of the programs' times: by how much launches disagree on the offset of the device's clock, which
    the programs read, to the profiler's."""


def recorded_replay(replay: Replay, launches: Sequence[Residency], sm_count: int) -> RecordedReplay:
    """Convert the times that programs recorded into the profiler's time.

    The two clocks have no common zero. They are aligned so that the middle of a launch, from its first
    program's start to its last one's end, is the middle of its kernel; of several launches by their median.

    Args:
        replay: of an overlapped network.
        launches: what its launches recorded, in order, with turns on the CPU.
        sm_count: SMs of the device.

    Raises:
        ValueError: not the launches of this replay, or one that did not record.
    """
    kernels = [kernel for kernel in replay if kernel.name.startswith(HEAD_KERNEL)]
    if len(kernels) != len(launches) or not kernels:
        raise ValueError(f"launches: got {len(launches)} that recorded, wants the {len(kernels)} of the replay")
    for launch in launches:
        check_turns(launch, sm_count)
    origin = min(int(launch.turns[:, 1].min()) for launch in launches)  # float64 does not hold nanoseconds since 1970
    turns = [
        sorted((start - origin, end - origin, sm) for sm, start, end in launch.turns.tolist()) for launch in launches
    ]
    shifts = [
        (kernel.start_us + kernel.end_us) / 2 - (of[0][0] + max(end for _, end, _ in of)) / 2e3
        for kernel, of in zip(kernels, turns, strict=True)
    ]
    shift = statistics.median(shifts)
    programs = [
        Program(number, sm, round(start / 1e3 + shift, 3), round(end / 1e3 + shift, 3))
        for number, of in enumerate(turns)
        for start, end, sm in of
    ]
    return RecordedReplay(replay, programs, round(max(shifts) - min(shifts), 3))


def check_turns(launch: Residency, sm_count: int) -> None:
    """Raise ``ValueError`` if a program of a launch did not record where it ran, or no such place or time."""
    sm, start, end = launch.turns.unbind(1)
    silent = int((sm < 0).sum())
    if silent:
        raise ValueError(f"turns: {silent} of {len(sm)} were not recorded, wants the launch to have run")
    if int(sm.max()) >= sm_count or bool((end < start).any()) or bool((start <= 0).any()):
        raise ValueError(f"turns: got an SM of {sm_count} that there is not, or an end before its start")
