"""The runners and trunks that a planner chooses from, simplest first, and the choice among those that were measured."""

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..network.early_exit_network import EarlyExitNetwork
from ..runners.graph_runner import GraphRunner
from ..runners.overlapped import fork_choices
from ..runners.runner import EagerRunner
from ..runners.table import RUNNERS, kind_of_runner
from ..trunk.backbone_rewriter import whole
from ..trunk.compile_workers import CompileWorkers, workers_for
from ..trunk.compiled_part import CompiledPart, handing_over
from ..trunk.trunk import TRUNKS, Trunk, begin_trunk
from .compiled_backbone import CompiledBackbone

#: What "auto" runs: of graphs, or, where a plan file says so, without.
MeasuredRunner = GraphRunner | EagerRunner


class Candidate(NamedTuple):
    """One way to run a network, in the terms of :func:`make_runner`."""

    exits: str
    """A name of ``RUNNERS``."""
    forks: tuple[str, ...] = ()
    compact: bool = False
    trunk: str = "as_is"
    """Kind of trunk that it runs on."""

    @property
    def name(self) -> str:
        """Name in reports and plans."""
        return self.runner if self.trunk == "as_is" else f"{self.runner} on {self.trunk}"

    @property
    def runner(self) -> str:
        """Name but for the trunk."""
        if self.exits == "overlapped":
            count = len(self.forks)
            return f"overlapped ({count} fork{'s' if count > 1 else ''})" if count else "serial"
        return self.exits + (" (compact)" if self.compact else "")

    def needless(self, exits: Tensor, taps: int) -> str | None:
        """Say why it can only be slower than what never stops, on batches of those exits [B, N]; None if it may win.

        A choice is by times on the example. Where none of its batches stops, no runner wins by stopping, whatever is
        expected of batches to come: that decides where a runner stops, and not which one is chosen.
        """
        if not kind_of_runner(self.exits, compact=self.compact).stops:
            return None
        early = exits < taps
        if self.compact:  # a part of the samples is enough
            return None if early.any() else "no sample of the example leaves early"
        return None if early.all(dim=1).any() else "no batch of the example leaves early"

    def make(
        self,
        network: EarlyExitNetwork,
        example_input: Tensor,
        size: int,
        smaller: Sequence[int],
        trunk: Trunk,
        done: Sequence[float] | None = None,
    ) -> MeasuredRunner:
        """Make the runner for a batch size, on a trunk of its kind; samples may be gathered into the smaller ones.

        For ``done``, by which it stops, see :class:`GraphRunner`.
        """
        kind = kind_of_runner(self.exits, compact=self.compact)
        if not kind.graphs:
            eager: EagerRunner = kind.imported_class()(network, trunk=trunk)
            return eager
        sizes = (*smaller, size) if self.compact else (size,)
        options: dict[str, Any] = {"forks": self.forks} if self.exits == "overlapped" else {"done": done}
        if self.compact:
            options = {}
        made: GraphRunner = kind.imported_class()(network, example_input, batch_sizes=sizes, trunk=trunk, **options)
        return made


def candidates(taps: Sequence[str], forks: Sequence[str], smaller: Sequence[int], trunk: str) -> list[Candidate]:
    """Return for one kind of trunk what a planner chooses from: of two that are equally fast, the one that comes first.

    The last of ``forks``, at which heads leave the trunk by rule, is the last one where it may pay; samples may be
    gathered into ``smaller`` batch sizes.
    """
    choices = [[], *(fork_choices(taps.index(forks[-1])) if forks else [])]  # the first is serial, heads at the end
    return [
        *(Candidate("overlapped", tuple(taps[index] for index in choice), trunk=trunk) for choice in choices),
        *(Candidate(exits, trunk=trunk) for exits, kind in RUNNERS.items() if kind.graphs and exits != "overlapped"),
        *([Candidate("polled", compact=True, trunk=trunk)] if smaller else []),
    ]


#: Chance alone may make one of two equal runners look faster this often.
_LEVEL = 0.005
#: Part of a time below which a difference is none: less than that is lost when the same graph is captured again.
LEAST_DIFFERENCE = 0.01


def choose(us: Mapping[str, Sequence[float]], plain: str) -> str:
    """Choose the plain runner, unless others are faster beyond noise; then the first as fast as the fastest of them.

    ``us`` holds by name, simplest first, the time of each pass; the n-th passes of all were measured beside each other.
    """
    faster = [name for name, times in us.items() if slower(us[plain], times)]
    if not faster:
        return plain
    fastest = min(faster, key=lambda name: statistics.median(us[name]))
    return next(name for name in faster if not slower(us[name], us[fastest]))


def slower(us: Sequence[float], other_us: Sequence[float]) -> bool:
    """Return whether a runner is slower than another in more passes than by chance, and by enough."""
    differences = [one - other for one, other in zip(us, other_us, strict=True)]
    least = LEAST_DIFFERENCE * statistics.median(other_us)
    return statistics.median(differences) >= least and _beyond_chance(sum(d > 0 for d in differences), len(differences))


def _beyond_chance(wins: int, passes: int) -> bool:
    """Return whether a fair coin comes up heads so often, in so many tosses, rarely enough."""
    return sum(math.comb(passes, count) for count in range(wins, passes + 1)) <= _LEVEL * 2**passes


#: Name of the choice among all kinds of trunks, and the kind that is the trunk "cudnn", run otherwise.
ANY_TRUNK = "auto"
BRANCHED = "branched"


class SharedTrunks:
    """Makes each kind of trunk at its first use."""

    def __init__(self, network: EarlyExitNetwork, example: Tensor, asked: str, made: Mapping[str, Trunk]) -> None:
        """Make trunks of a network for batches like the example, but for those that runners have already ``made``."""
        self.kinds = tuple(kind for kind in TRUNKS if kind != BRANCHED) if asked == ANY_TRUNK else (asked,)
        """Kinds to choose from, simplest first; "branched", too, where the trunk "cudnn" is found to have branches."""
        self._network, self._example = network, example
        self._made: dict[str, Trunk] = {}
        self._refused: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._workers: CompileWorkers | None = None
        self._begun: Callable[[], Trunk] | None = None  # what goes on with the trunk that the workers compile
        self._beside: CompileWorkers | None = None  # compiles the backbone alone, to compare with
        self._whole: CompiledPart | None = None
        for kind, trunk in made.items():
            self._add(kind, trunk)

    def _add(self, kind: str, trunk: Trunk) -> None:
        self._made[kind] = trunk
        if trunk.branches and len(self.kinds) > 1:
            self._made[BRANCHED] = replace(trunk, side_by_side=True)

    def expect_compiling(self) -> None:
        """Begin workers, if what they would do is to be done: they take seconds to begin."""
        if "inductor" not in self.kinds or self.is_known("inductor"):
            return
        if count := workers_for(self._example.device):
            self._workers, self._beside = CompileWorkers(count), CompileWorkers(1, patient=True)

    def begin_compiling(self) -> None:
        """Let workers, if there are some, compile what :meth:`get` of the trunk "inductor" will find then."""
        if self._workers is not None and self._begun is None:
            with suppress(RuntimeError), torch.cuda.device_of(self._example):  # for which it fails again in ``get``
                self._begun = self._begin("inductor", self._workers.take)
                self._begin_whole()

    def is_compiled(self, until: float) -> bool:
        """Wait for workers until then, by ``time.monotonic``; returns whether they compiled the trunk "inductor"."""
        with torch.cuda.device_of(self._example):
            return self._begun is not None and self._workers is not None and self._workers.wait(until)

    def close(self) -> None:
        """End what was begun to compile."""
        for workers in (self._workers, self._beside):
            if workers is not None:
                workers.close()
        self._workers = self._beside = self._begun = None

    def compiled_backbone(self, example: Tensor, until: float) -> CompiledBackbone | None:
        """Return the backbone alone, compiled, for a batch like that of the trunks; None if it is not there in time.

        Raises:
            RuntimeError: it cannot be captured.
        """
        if self._whole is None or self._beside is None or example.shape != self._example.shape:
            return None
        with torch.cuda.device_of(example):
            if not self._beside.wait(until):
                return None
        return CompiledBackbone(self._whole, self._network.backbone, example)

    def _begin_whole(self) -> None:
        """Let the backbone alone be compiled beside all else, if it can be."""
        try:
            found = whole(self._network.backbone)
            if found is not None and self._beside is not None:
                with handing_over(self._beside.take), torch.inference_mode(False), torch.no_grad():
                    found(self._example.clone(memory_format=torch.preserve_format))
                self._whole = found
        except Exception:  # of PyTorch's tracer, which takes no branches on data, say
            return

    def is_known(self, kind: str) -> bool:
        """Return whether asking for a trunk takes no time."""
        return kind in self._made or kind in self._refused

    def get(self, kind: str) -> Trunk:
        """Return a trunk.

        Raises:
            RuntimeError: it cannot be made of this backbone; the message says why.
        """
        if not self.is_known(kind):
            began = time.monotonic()
            begun = None
            with torch.cuda.device_of(self._example):
                if kind == "inductor" and self._workers is not None:
                    if self._begun is not None:
                        self._workers.wait()
                    self._workers.close()
                    begun, self._begun, self._workers = self._begun, None, None
                trunk = (begun or self._begin(kind))()
            if kind != "as_is" and trunk.module is self._network.backbone:
                self._refused[kind] = " ".join(trunk.notes).removeprefix(f"Not {kind}: ")
            else:
                self._add(kind, trunk)
            self._seconds[kind] = time.monotonic() - began
        if kind in self._refused:
            raise RuntimeError(self._refused[kind])
        return self._made[kind]

    def _begin(self, kind: str, hand_over: Any = None) -> Callable[[], Trunk]:
        if kind == "inductor":
            threading.Thread(target=_import_compiler, daemon=True).start()  # beside all else: it takes seconds
        network = self._network
        return begin_trunk(network.backbone, network.taps, self._example, kind, network.reading, hand_over)

    def seconds_for(self, kind: str, size: int) -> float:
        """Return the time to expect of compiling a trunk anew, for a batch of another size than the example's."""
        return self._seconds.get(kind, 0.0) if kind == "inductor" and size != len(self._example) else 0.0


def _import_compiler() -> None:
    import torch._inductor.compile_fx  # noqa: F401
