"""Timing of heads on a GPU, each as a chain of launches in a graph; and of copies."""

import atexit
import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...model import make_trunk
from ..records.comparison import Paired
from ..records.summaries import Timings
from .captured import CHAIN, chain
from .compile_pool import CompilePool, InputOf, compile_alone
from .failures import DeviceLost, Failure, WrongAnswer, refuse
from .heads_alone import FUSED, LAUNCHES, PEERS, AloneHead, Launch, Target, heads_of
from .subject import Subject
from .timers import PROTOCOL, Key, block_length, time_rounds, time_those_that_run

#: Bytes of a copy: many times what a cache holds.
COPIED = 2**30
#: Copies between two events.
_REPEAT = 4


def time_copies(device: torch.device, rounds: int) -> Timings:
    """Return microseconds, [1][rounds], of copies of ``COPIED`` bytes within a CUDA device, which has room for two."""
    source = torch.empty(COPIED, dtype=torch.uint8, device=device).random_()  # zeros may be faster
    target = torch.empty_like(source)
    times = time_rounds({"copy": [lambda: target.copy_(source)]}, device, rounds=rounds, repeat=_REPEAT)
    return times["copy"]


def floor_of(moved: int, copies: Timings) -> Timings:
    """Return the microseconds that ``moved`` bytes, read or written, take at the speed of copies, one by one."""
    return [[us * moved / (2 * COPIED) for us in rounds] for rounds in copies]


class HeadTiming:
    """Measures heads by themselves on one CUDA device, of a network or of none.

    The baseline is the rule's configuration: where it fails, nothing is timed.
    """

    def __init__(
        self, device: torch.device, heads: Mapping[Target, AloneHead], pool: CompilePool | None = None
    ) -> None:
        """Measure these heads, which may be exchanged for others; a pool compiles before they launch."""
        self.heads = heads
        """For each shape a head that has it, with its input."""
        self._device = device
        self._pool = pool
        self._lost: str | None = None

    @classmethod
    def of_network(cls, subject: Subject, trunk: str = "cudnn", pool: CompilePool | None = None) -> "HeadTiming":
        """Measure the heads of a network, one of each shape, with what a trunk of that kind gives them."""
        network, example = subject.network, subject.example
        made = make_trunk(network.backbone, network.taps, example, trunk, network.reading)
        by_shape: dict[HeadShape, dict[str, AloneHead]] = {}
        for tap, head in zip(network.taps, heads_of(subject, made), strict=True):
            by_shape.setdefault(head.shape, {})[tap] = head
        heads = {
            Target(shape, subject.cell.model, tuple(its)): next(iter(its.values())) for shape, its in by_shape.items()
        }
        return cls(example.device, heads, pool)

    @property
    def targets(self) -> list[Target]:
        """The shapes of heads, in the order of the heads."""
        return list(self.heads)

    @property
    def protocol(self) -> dict[str, Any]:
        """Conditions of all times, as records keep them."""
        return {"chain": CHAIN, "place": "alone", **PROTOCOL}

    def prepare(self, target: Target, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Compile each configuration, if there is a pool, launch each once in threads, and check its answers."""
        head = self.heads[target]
        if self._pool is not None:
            described = InputOf.of(head)
            self._pool.run([partial(compile_alone, described, config) for config in configs])
        return self._launch_and_check(head, configs)

    def time(
        self, target: Target, configs: Sequence[LaunchConfig], rounds: int, captures: int
    ) -> Mapping[LaunchConfig, Paired | Failure]:
        """Time chains of launches in graphs."""
        return self._time(target.rule, configs, self.heads[target].chain, rounds, captures, launches=CHAIN)

    def against_peers(
        self, target: Target, rounds: int, captures: int, begins: Callable[[str], None],
        variants: Sequence[str] = PEERS, launches: int | None = None,
    ) -> Mapping[str, Paired | Failure]:  # fmt: skip
        """Time a head launched as the project chooses between its peers; microseconds of a head.

        Args:
            target: its shape.
            rounds: of each capture.
            captures: of each variant.
            begins: is told which variant is made, checked and captured.
            variants: of ``LAUNCHES``, the fused head among them.
            launches: of a head in one graph; None: ``CHAIN``.

        Returns:
            For each variant its times and those of the fused head in the same rounds; the answers of every timed
            capture were compared with the truth.
        """
        head = self.heads[target]
        begins(FUSED)
        failed = self._launch_and_check(head, [head.chosen]).get(head.chosen)
        if failed is not None:
            nothing = Failure("no baseline", "the fused head failed")
            return {variant: failed if variant == FUSED else nothing for variant in variants}
        made: dict[str, Launch] = {FUSED: LAUNCHES[FUSED](head)}

        def build(variant: str) -> Callable[[], object]:
            if variant not in made:
                begins(variant)
                made[variant] = LAUNCHES[variant](head)
            captured = chain(made[variant], self._device, launches)
            captured()
            refuse(head.wrong_answer(captured.answer, peer=variant != FUSED))
            return captured

        found = self._time(FUSED, variants, build, rounds, captures, launches or CHAIN)
        return {variant: found[variant] for variant in variants}

    def _launch_and_check(self, head: AloneHead, configs: Sequence[LaunchConfig]) -> dict[LaunchConfig, Failure]:
        self.check_device()
        failed = first_launches(configs, head.launch, self._device)
        endless = next((failure for failure in failed.values() if failure.kind == NEVER_ENDS), None)
        if endless is not None:
            self._lost = str(endless)
            return failed
        self._note_if_lost()
        for config in configs:
            if config not in failed:
                self.check_device()
                try:
                    refuse(head.wrong(config))
                except Exception as error:
                    failed[config] = self.failure_of(error)
        return failed

    def _time(
        self, baseline: Key, variants: Sequence[Key], build: Callable[[Key], Callable[[], object]], rounds: int,
        captures: int, launches: int,
    ) -> dict[Key, Paired | Failure]:  # fmt: skip
        """Capture and time; a variant that fails is left out, and the rest is timed again.

        Variants are captured in turns, too, in another order each time: captures differ, it seems by where their memory
        lies, and not independently: neighbours of twelve made one after another correlate by -0.26 (H200).
        """
        results: dict[Key, Paired | Failure] = {}
        calls: dict[Key, list[Callable[[], object]]] = {variant: [] for variant in variants}

        def failed(variant: Key, _calls: object, error: BaseException) -> None:
            results[variant] = self.failure_of(error)

        order = random.Random(0)
        for _ in range(captures):
            for variant in order.sample(list(calls), len(calls)):
                self.check_device()
                try:
                    calls[variant].append(build(variant))
                except Exception as error:
                    failed(variant, calls.pop(variant), error)

        def timed(left: Mapping[Key, Sequence[Callable[[], object]]]) -> Mapping[Key, Timings]:
            if baseline not in left:
                return {}
            self.check_device()
            repeat = block_length({baseline: left[baseline]}, self._device)
            return time_rounds(left, self._device, rounds=rounds, repeat=repeat)

        times = time_those_that_run(calls, timed, failed) or {}
        run = secrets.token_hex(6)
        each = {variant: [[us / launches for us in one] for one in found] for variant, found in times.items()}
        return {**results, **{variant: Paired(own, each[baseline], run) for variant, own in each.items()}}

    def failure_of(self, error: BaseException) -> Failure:
        """Return what failed, and remember whether the device is lost with it."""
        if isinstance(error, WrongAnswer):
            return Failure("wrong answer", str(error))
        self._note_if_lost()
        return Failure.of(error)

    def _note_if_lost(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except Exception as error:
            self._lost = str(Failure.of(error))

    def check_device(self) -> None:
        """Raise ``DeviceLost`` if it takes no more work."""
        if self._lost is not None:
            raise DeviceLost(f"the CUDA context is lost ({self._lost})")


#: Variants compiled at the same time, at most: each takes a core.
_MOST_WORKERS = 32
#: Seconds within which a launched kernel, which takes microseconds, has ended; the first ones also load code.
ENDS_S = 20.0
#: The kind of failure of a launch that had not.
NEVER_ENDS = "does not end"


def first_launches(
    variants: Sequence[Key], launch: Callable[[Key], object], device: torch.device
) -> dict[Key, Failure]:
    """Launch each variant once on a CUDA device, and return what failed.

    A kernel that never ends cannot be stopped, and whatever waits for the device waits for ever. So after a failure of
    the kind ``NEVER_ENDS`` nothing may, and the process ends without waiting once it gets there.
    """

    def attempt(variant: Key) -> Failure | None:
        try:
            stream = torch.cuda.Stream(device)  # of its own: the others are not to wait for it
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), torch.no_grad():
                launch(variant)
            return None if _ends(stream) else Failure(NEVER_ENDS, f"a launch was not done after {ENDS_S:g} s")
        except Exception as error:
            return Failure.of(error)

    first = [attempt(variant) for variant in variants[:1]]  # by itself: it reads the kernel's sources for all
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_WORKERS)) as pool:
        rest = list(pool.map(attempt, variants[1:]))
    found = {variant: failed for variant, failed in zip(variants, first + rest, strict=True) if failed}
    if any(failed.kind == NEVER_ENDS for failed in found.values()):
        atexit.register(_leave)
    return found


def _ends(stream: torch.cuda.Stream) -> bool:
    """Wait for a stream, though not for ever."""
    until = time.monotonic() + ENDS_S
    while not stream.query():
        if time.monotonic() > until:
            return False
        time.sleep(0.0002)
    return True


def _leave() -> None:
    """End the process at once: to take CUDA down in order waits for the device."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
