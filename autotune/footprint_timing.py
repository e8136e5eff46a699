"""Measures what footprints of heads do to the trunk on a GPU: times, interleaved, and then residency and occupancy."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.residency import Residency, recording
from ..model.overlapped_runner import OverlappedRunner
from .cells import NEVER
from .comparison import Paired
from .footprints import Footprint
from .head_timing import HeadTiming
from .measurer import Failure
from .occupancy import Estimate, Resident, Theoretical, estimates, max_warps, resident, theoretical
from .profiling import WARM_UP, record_trace

#: Replays whose residency is summed up: each is the last of some back to back, as those that are timed are.
REPLAYS = 7
_BACK_TO_BACK = 3


class Variant(NamedTuple):
    """What is timed."""

    what: str
    """``BARE``, ``BOTH``, ``ALONE`` or ``RECORDED``."""
    footprint: Footprint | None = None


#: The trunk without heads.
BARE = "bare"
#: The network with its heads beside the trunk.
BOTH = "both"
#: The heads without the trunk, one launch after another.
ALONE = "heads alone"
#: As ``BOTH``, while every program records where it runs.
RECORDED = "recorded"


class Occupied(NamedTuple):
    """How full the launches of one footprint make the SMs, tier by tier; see ``occupancy.TIERS``."""

    theoretical: list[Theoretical]
    """Of each launch beside the trunk; of the last one, with the classifier, if there is no other."""
    estimate: list[Estimate]
    """Of the same."""
    residency: list[Resident]
    """Of each of ``REPLAYS`` what the same launches took of the SMs in the time of the bare trunk."""
    programs: int
    """Of these launches."""


class FootprintTiming(HeadTiming):
    """Measures footprints of one network's heads."""

    def footprint_times(
        self, footprints: Sequence[Footprint], rounds: int, captures: int
    ) -> dict[Variant, Paired | Failure]:
        """Time every footprint in fresh captures, and in the same rounds the bare trunk, which is the baseline.

        Of each the whole network and its heads alone; of the first one also while it is recorded.
        """
        failed = self._compile(footprints, self._launch)
        chosen = [one for one in footprints if one not in failed]
        variants = [Variant(BARE), *(Variant(what, one) for one in chosen for what in (BOTH, ALONE))]
        variants += [Variant(RECORDED, one) for one in chosen[:1]]
        with ExitStack() as opened, self._subject.exits(NEVER):

            def build(variant: Variant) -> list[Callable[[], object]]:
                return [self._capture(variant, opened) for _ in range(captures)]

            found = self._time(Variant(BARE), variants, build, rounds, launches=1)
        found |= {Variant(BOTH, footprint): failure for footprint, failure in failed.items()}
        return {variant: _of_one_launch(variant, result) for variant, result in found.items()}

    def _launch(self, footprint: Footprint) -> None:
        """Compile, with and without recording."""
        taps, configs = self._subject.network.taps, dict(footprint.configs)
        self._in_situ.launch(configs, footprint.point, taps)
        with recording():
            self._in_situ.launch(configs, footprint.point, taps)

    def _capture(self, variant: Variant, opened: ExitStack) -> Callable[[], object]:
        if variant.footprint is None:
            return self._in_situ.bare()
        if variant.what == ALONE:
            return self._in_situ.heads_alone(dict(variant.footprint.configs), variant.footprint.point)
        if variant.what == RECORDED:
            with recording():
                runner = self._runner(variant.footprint, opened)
        else:
            runner = self._runner(variant.footprint, opened)
        return lambda: runner(self._subject.example)

    def _runner(self, footprint: Footprint, opened: ExitStack) -> OverlappedRunner:
        runner = self._in_situ.runner(dict(footprint.configs), footprint.point)
        opened.callback(runner.close)
        self._check(runner)
        return runner

    def occupied(self, footprints: Sequence[Footprint], trunk_us: float) -> dict[Footprint, Occupied]:
        """Measure the residency of footprints, and look up the other tiers; to be called after all timing.

        Args:
            footprints: that were timed.
            trunk_us: what the bare trunk takes, of which residency is a share.
        """
        device = self._device
        beside = slice(0, -1) if self.by_rule.forks else slice(None)
        with ExitStack() as opened, self._subject.exits(NEVER), torch.cuda.device(device):
            runners, lists = [], []
            for footprint in footprints:
                with recording() as launches:
                    runners.append(self._runner(footprint, opened))
                lists.append(launches[beside])
            residencies = [
                self._residency(runner, launches, trunk_us) for runner, launches in zip(runners, lists, strict=True)
            ]
            estimated = self._estimated(runners)
            return {
                footprint: Occupied(self._theoretical(footprint)[beside], said[beside], found, _programs(launches))
                for footprint, said, found, launches in zip(footprints, estimated, residencies, lists, strict=True)
            }

    def _residency(
        self, runner: OverlappedRunner, launches: Sequence[Residency], trunk_us: float
    ) -> list[Resident]:
        sm_count = torch.cuda.get_device_properties(self._device).multi_processor_count
        found = []
        for _ in range(REPLAYS):
            for launch in launches:
                launch.turns.fill_(-1)
            for _ in range(_BACK_TO_BACK):
                runner(self._subject.example)
            torch.cuda.synchronize(self._device)
            said = [launch._replace(turns=launch.turns.cpu()) for launch in launches]
            found.append(resident(said, sm_count, max_warps(self._device), trunk_us))
        return found

    def _estimated(self, runners: Sequence[OverlappedRunner]) -> list[list[Estimate]]:
        """Profile one replay of each runner."""
        order = iter([runners[0]] * WARM_UP + list(runners))
        with tempfile.TemporaryDirectory() as folder:
            trace = record_trace(
                lambda x: next(order)(x), self._subject.example, len(runners), Path(folder) / "trace.json"
            )
        found = estimates(trace)
        if len(found) != len(runners):
            raise RuntimeError(f"the profiler saw {len(found)} of {len(runners)} replays with heads")
        return found

    def _theoretical(self, footprint: Footprint) -> list[Theoretical]:
        """Ask of the kernels that do not record, which are those that are timed."""
        taps, configs = self._subject.network.taps, dict(footprint.configs)
        launched = self._in_situ.launch(configs, footprint.point, taps, with_classifier=True)
        return [theoretical(one.launch.compiled, self._device) for one in launched]


def _programs(launches: Sequence[Residency]) -> int:
    return sum(launch.programs for launch in launches)
