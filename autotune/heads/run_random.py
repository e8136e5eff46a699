"""Measures random heads, those that the file of records lacks, while further kernels are compiled in parallel."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from ...kernels.launch.kernel_hash import kernel_hash
from ...kernels.launch.launch_config import LaunchConfig
from ...model.basics.bad_input import BadInput
from ..measuring.captured import CHAIN
from ..measuring.compile_pool import CompilePool, InputOf, compile_alone
from ..measuring.environment import clocks, environment, release_memory, this_device
from ..measuring.failures import DeviceLost, Failure
from ..measuring.head_timing import HeadTiming, time_copies
from ..measuring.heads_alone import COMPILED, EAGER, FUSED, OTHER_WAY, Target
from ..measuring.progress import Status, SweepProgress
from ..measuring.timers import CAPTURES, FINAL_ROUNDS
from ..records.comparison import Paired, compare
from ..records.heads import RANDOM, head_in_words, last_runs
from ..records.record import read_records, records_path
from ..records.tables import print_tables, wide_console
from .random_heads import RandomHead, draw
from .run import Head, HeadRecords
from .tables import random_head_tables

#: Rounds and captures of a head, and those where the first ones leave open on which side of an edge it is.
_EFFORTS = ((10, 3), (FINAL_ROUNDS, CAPTURES))
#: Ratios of plain PyTorch's time to the fused head's that matter.
_EDGES = (0.9, 1.0)
#: Bytes that the launches of one graph move: heads of more than a twentieth of this are chained in smaller numbers.
_CHAINED_BYTES = 400_000_000
#: Bytes that are in use between two heads from which on it is looked for what Python has not yet freed.
_MUCH_MEMORY = 4_000_000_000


#: Clocks are asked for after one head in so many: to ask takes about as long as a head.
_CLOCKS_EVERY = 10


class _Asked(NamedTuple):
    """A head that is asked for, without data."""

    drawn: RandomHead
    head: Head
    description: InputOf
    configs: tuple[LaunchConfig, LaunchConfig]
    """Of its two ways."""


def run_random_heads(count: int, seed: int, compiled_every: int, out: Path | None) -> int:
    """Measure the first heads of a seed, one in so many with torch.compile, too (0: none), and print their tables.

    Returns:
        How many fused heads failed or answered wrongly.

    Raises:
        BadInput: no CUDA device, or one that was lost.
        BadRecord: ``out`` cannot be read.
    """
    console, device = wide_console(), this_device("heads --random")
    where, timing = records_path(out, RANDOM, torch.cuda.get_device_name(device)), HeadTiming(device, {})
    how = {"kernel": kernel_hash(), **timing.protocol, "rounds": _EFFORTS[0][0]}
    kept = HeadRecords(where, environment(device), how, RANDOM)
    asked = [_asked(draw(seed, number), compiled_every, device) for number in range(count)]
    missing, began = [one for one in asked if not kept.has(one.head)], time.monotonic()
    if missing:
        _measure_all(missing, timing, kept, device, console)
    cells = [one.head.cell for one in asked]
    found = [record for record in read_records(where) if record.kind == RANDOM and record.cell in cells]
    print_tables(console, random_head_tables(found), where)
    console.print(f"Measured {len(missing)} heads in {time.monotonic() - began:.0f} s.")
    return sum(run[FUSED].error is not None for run in last_runs(found, RANDOM))


def _asked(drawn: RandomHead, compiled_every: int, device: torch.device) -> _Asked:
    planned, compiled = drawn.planned(device), compiled_every > 0 and drawn.number % compiled_every == 0
    variants = (FUSED, OTHER_WAY, EAGER, *[COMPILED] * compiled)
    configs = (planned.chosen, planned.other_way)
    return _Asked(drawn, Head(drawn.cell, configs[0], planned.bytes_moved, variants), InputOf.of(planned), configs)


def _measure_all(
    missing: Sequence[_Asked], timing: HeadTiming, kept: HeadRecords, device: torch.device, console: Console
) -> None:
    """Measure and record heads as their kernels get ready; last those that torch.compile needs the cores for, too."""
    failures: Counter[str] = Counter()
    copies = time_copies(device, FINAL_ROUNDS)
    jobs = [partial(compile_alone, one.description, *one.configs) for one in missing]
    with CompilePool(torch.cuda.get_device_capability(device)) as pool, SweepProgress(console) as progress:
        progress.show(Status(0.0, f"compiling {len(missing)} heads", "", failures))
        ready = (missing[place] for place in pool.as_done(jobs))
        for done, (drawn, head, *_) in enumerate(_sample_last(ready)):
            what = f"head {drawn.number}, {head_in_words(head.cell)}"
            progress.show(Status(done / len(missing), what, "", failures))
            try:
                results, effort = _measured(drawn, head, timing, device)
            except DeviceLost as error:
                lost = Failure("DeviceLost", str(error))
                kept.add(head, dict.fromkeys(head.variants, lost), copies, None)
                raise BadInput(f"{error}; it is recorded: the same command goes on with the rest") from None
            failures.update(result.kind for result in results.values() if isinstance(result, Failure))
            now = clocks(device) if done % _CLOCKS_EVERY == 0 else None
            kept.add(head, results, copies, now, **effort)
            if torch.cuda.memory_allocated(device) > _MUCH_MEMORY:
                release_memory()


def _sample_last(heads: Iterable[_Asked]) -> Iterator[_Asked]:
    sample = []
    for one in heads:
        if COMPILED in one.head.variants:
            sample.append(one)
        else:
            yield one
    yield from sample


def _measured(
    drawn: RandomHead, head: Head, timing: HeadTiming, device: torch.device
) -> tuple[Mapping[str, Paired | Failure], dict[str, int]]:
    """Make a head, compare its answers with the truth, and time it; return the results and what of the protocol is its.

    Captures are few unless they leave open what matters.
    """
    effort = {"chain": max(1, min(CHAIN, _CHAINED_BYTES // head.bytes_moved))}
    timing.check_device()
    try:
        alone = drawn.made(device)
    except Exception as error:  # no memory, say
        return dict.fromkeys(head.variants, timing.failure_of(error)), effort
    target = Target(alone.shape, "random", (f"head {drawn.number}",))
    timing.heads = {target: alone}
    for rounds, captures in _EFFORTS:
        effort |= {"rounds": rounds, "captures": captures}
        results = timing.against_peers(target, rounds, captures, lambda _variant: None, head.variants, effort["chain"])
        eager = results[EAGER]
        if isinstance(eager, Failure) or not _leaves_open(eager):
            break
    timing.heads = {}
    return results, effort


def _leaves_open(eager: Paired) -> bool:
    _, low, high = compare(eager.own, eager.baseline)
    return any(low <= edge <= high for edge in _EDGES)
