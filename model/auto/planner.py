"""``Planner``: measures trunks and runners for a batch size, and keeps the chosen runner."""

import datetime
import statistics
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from torch import Tensor

from ..basics.energy import energy_counter, joules_a_call
from ..network.early_exit_network import EarlyExitNetwork
from ..runners.overlapped import OverlappedRunner
from ..runners.runner import Runner
from .candidates import BRANCHED, Candidate, MeasuredRunner, SharedTrunks, candidates, choose
from .compiled_backbone import COMPILED
from .pass_times import BUDGETS, ENERGY_S, Deadline, PassTimes, done_of, least_requests, measure, shares_of
from .plan import Plan

#: Part of the time for a batch size that measuring one runner may take: ten are measured, and made before.
_SHARE_OF_ONE = 1 / 32
#: Part of a budget that has to be left for making a trunk, which is not cut short, where it is not the first; and for
#: one that is compiled already.
_SHARE_FOR_A_TRUNK = {"cudnn": 1 / 4, "inductor": 1 / 2}
_SHARE_ONCE_COMPILED = 1 / 7
#: And for comparing with torch.compile, which is captured for that.
_SHARE_FOR_COMPARING = 1 / 10


class Planner:
    """Measures for one batch size: runners that are open, and the reasons why others are not."""

    def __init__(
        self,
        network: EarlyExitNetwork,
        example_input: Tensor,
        size: int,
        trunks: SharedTrunks,
        deadline: Deadline,
        say: Callable[[str], None],
    ) -> None:
        """Plan for samples like those of the example; sizes share trunks and the time until a deadline.

        ``say`` is told what begins, in a few words.
        """
        self._say = say
        self._network, self._example, self._size = network, example_input, size
        self._trunks, self._deadline = trunks, deadline
        self._plain: dict[str, Candidate] = {}  # by the kind of its trunk, what others have to beat first
        self._candidates: dict[str, Candidate] = {}
        self._runners: dict[str, MeasuredRunner] = {}  # by name, those that are open
        self._left_out: dict[str, str] = {}
        self._made_s: list[float] = []  # what making each runner took

    def plan(
        self, batches: Sequence[Tensor], exits: Tensor, smaller: Sequence[int], parts: int
    ) -> tuple[Plan, MeasuredRunner]:
        """Measure the plain graph on every trunk, then all runners on the best of them, and keep one runner.

        The ``batches`` are cut from the example, all of one size; ``exits`` is what :func:`exits_of` says of them.
        Samples may be gathered into ``smaller`` batches. Of the time that is left this takes one of so many equal
        ``parts``, once all trunks are made; what does not fit is left out, but for the plain graph: it is measured on
        each trunk that was made, unless that has to be compiled anew for this size.

        Raises:
            RuntimeError: the plain graph cannot be captured.
        """
        kept = ""
        try:
            self._tell("rewriting the backbone")
            self._trunks.begin_compiling()
            plain = self._add_first()
            kinds = self._make_trunks()
            self._deadline = self._deadline.part(parts)
            batches = self._within_time(batches)
            trunk_times = self._measure_trunks(kinds, batches)
            # of one runner on several trunks; the host's part, which is the same for all, would only add noise
            best = choose({kind: times.device for kind, times in trunk_times.items()}, plain.trunk)
            self._close_all_but((plain.name, self._plain[best].name))
            times = self._measure_runners(best, smaller, batches, exits)
            chosen = choose({name: passes.host for name, passes in times.items()}, plain.name)
            joules = self._joules(dict.fromkeys((chosen, plain.name)), batches, times)
            compiled = self._beside_compiled(chosen, batches)
            kept = chosen
        finally:
            self._close_all_but((kept,))
        plan = Plan(
            chosen=self._candidates[chosen],
            plain=plain.name,
            times=times,
            trunk_times=trunk_times,
            left_out=self._left_out,
            shares=shares_of(exits[: len(batches)], len(self._network.taps)),
            utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            joules=joules,
            compiled=compiled,
            hurried=any(
                self._left_out.get(f"trunk {kind}") == self._deadline.too_late() for kind in self._trunks.kinds
            ),
        )
        return plan, self._runners[chosen]

    def _add_first(self) -> Candidate:
        """Make the plain graph on the first trunk, or on the backbone as it is where there is no such trunk."""
        kind = self._trunks.kinds[0]
        try:
            self._trunks.get(kind)
        except RuntimeError as error:
            if kind == "as_is":
                raise
            self._left_out[f"trunk {kind}"], kind = str(error), "as_is"
        return self._add_plain(kind)

    def _make_trunks(self) -> list[str]:
        """Make the other trunks; while workers compile one, make the plain graphs on the others. Returns the kinds."""
        kinds = []
        for kind in self._trunks.kinds[1:]:
            if self._make_trunk(kind):
                kinds.append(kind)
                if kind == "cudnn":
                    kinds += [BRANCHED] if self._trunks.is_known(BRANCHED) else []
                    self._add_plain_graphs(kinds)
        return kinds

    def _make_trunk(self, kind: str) -> bool:
        """Return whether there is that trunk, made now if there is time; else the reason is noted."""
        deadline, why = self._deadline, None
        if not self._trunks.is_known(kind):
            self._tell(f"{'compiling' if kind == 'inductor' else 'making'} the trunk {kind!r}")
            share = _SHARE_FOR_A_TRUNK[kind]
            if kind == "inductor" and self._trunks.is_compiled(deadline.end - deadline.seconds * _SHARE_ONCE_COMPILED):
                share = 0.0
            if kind == "inductor" and deadline.budget == "quick":
                why = f"compiling takes longer than {deadline}"
            elif deadline.left < deadline.seconds * share:
                why = deadline.too_late()
        if why is None:
            try:
                self._trunks.get(kind)
            except RuntimeError as error:
                why = str(error)
        if why is not None:
            self._left_out[f"trunk {kind}"] = why
        return why is None

    def _tell(self, what: str) -> None:
        """Say what begins."""
        self._say(f"batch {self._size}: {what}; {max(self._deadline.left, 0.0):.0f} s left of {self._deadline}")

    def _add_plain(self, kind: str) -> Candidate:
        """Make the plain graph on a trunk that was made."""
        self._tell(f"the plain graph on the trunk {kind!r}")
        began = time.monotonic()
        runner = OverlappedRunner(self._network, self._example, batch_sizes=(self._size,), trunk=self._trunks.get(kind))
        self._plain[kind] = candidate = Candidate("overlapped", runner.forks[self._size], trunk=kind)
        self._add(candidate, runner, began)
        return candidate

    def _add(self, candidate: Candidate, runner: MeasuredRunner, began: float) -> None:
        self._candidates[candidate.name], self._runners[candidate.name] = candidate, runner
        self._made_s.append(time.monotonic() - began)

    def _within_time(self, batches: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return as many of the batches as there is time for, by what the first runner takes for one."""
        runner = next(iter(self._runners.values()))
        for _ in range(2):  # the first is slow
            began = time.monotonic()
            runner(batches[-1]).label.cpu()
            took = max(time.monotonic() - began, 1e-6)
        count = len(batches)
        while count > 1 and least_requests(count) * took > self._deadline.left * _SHARE_OF_ONE:
            count -= 1
        self._one_s = least_requests(count) * took
        return batches[:count]

    def _has_time(self, more_s: float = 0.0) -> bool:
        """Return whether one runner more can be made, in the time that any other took, and all of them measured.

        On a new machine most of that time is Triton's, which compiles for each way to share launches.
        """
        return max(self._made_s) + more_s + self._one_s * (len(self._runners) + 1) <= self._deadline.left

    def _measure_trunks(self, kinds: Sequence[str], batches: Sequence[Tensor]) -> dict[str, PassTimes]:
        """Measure the plain graph on the trunks of those kinds, too; by kind, and none if there is no other trunk."""
        self._add_plain_graphs(kinds)
        if len(self._plain) == 1:
            return {}
        times = measure({each.name: self._runners[each.name] for each in self._plain.values()}, batches, self._deadline)
        return {kind: times[candidate.name] for kind, candidate in self._plain.items()}

    def _add_plain_graphs(self, kinds: Sequence[str]) -> None:
        """Make the plain graph on trunks of those kinds on which there is none yet."""
        for kind in kinds:
            if kind in self._plain or f"trunk {kind}" in self._left_out:
                continue
            anew_s = self._trunks.seconds_for(kind, self._size)
            if anew_s and not self._has_time(anew_s):
                self._left_out[f"trunk {kind}"] = self._deadline.too_late()
                continue
            try:
                self._add_plain(kind)
            except RuntimeError as error:
                self._left_out[f"trunk {kind}"] = str(error)

    def _measure_runners(
        self, kind: str, smaller: Sequence[int], batches: Sequence[Tensor], exits: Tensor
    ) -> dict[str, PassTimes]:
        """Make all candidates on a trunk, compare them with the plain graph on it, and measure all that is open.

        Those that stop early are made where batches of such ``exits`` do.
        """
        plain, trunk, taps = self._plain[kind], self._trunks.get(kind), len(self._network.taps)
        done = done_of(exits, taps)
        known = candidates(self._network.taps, plain.forks, smaller, kind)
        # Should there be too little time, then for those that make the least difference.
        for candidate in sorted(known, key=lambda candidate: candidate.exits == "overlapped"):
            name = candidate.name
            if name in self._runners:
                continue
            why = candidate.needless(exits, taps)
            if why is None and not self._has_time():
                why = self._deadline.too_late()
            if why is not None:
                self._left_out[name] = why
                continue
            self._tell(name)
            began = time.monotonic()
            try:
                runner = candidate.make(self._network, self._example, self._size, smaller, trunk, done)
            except RuntimeError as error:
                self._left_out[name] = str(error)
                continue
            self._add(candidate, runner, began)
            if not _alike(runner, self._runners[plain.name], batches):
                self._runners.pop(name).close()
                self._left_out[name] = f"it answered otherwise than {plain.name}"
        simplest_first = dict.fromkeys([candidate.name for candidate in known])
        names = [*(self._runners.keys() - simplest_first), *(name for name in simplest_first if name in self._runners)]
        self._tell(f"measuring {len(names)} runners")
        return measure({name: self._runners[name] for name in names}, batches, self._deadline)

    def _joules(
        self, names: Iterable[str], batches: Sequence[Tensor], times: Mapping[str, PassTimes]
    ) -> dict[str, float]:
        """Measure what a request to each of those runners takes of energy; none where the driver counts none."""
        read = energy_counter(self._example.device)
        if read is None:
            return {}
        self._tell("measuring energy")
        us = {name: statistics.median(times[name].device) for name in names}
        try:
            return {name: joules_a_call(self._runners[name], batches, us[name], read, ENERGY_S) for name in us}
        except Exception:  # of the driver, which has counted a moment ago
            return {}

    def _beside_compiled(self, chosen: str, batches: Sequence[Tensor]) -> dict[str, PassTimes]:
        """Measure the chosen runner beside the backbone alone through torch.compile; nothing if that is not there."""
        least = BUDGETS[self._deadline.budget] * _SHARE_FOR_COMPARING
        if self._deadline.left < least:
            return {}
        try:
            compiled = self._trunks.compiled_backbone(batches[0], self._deadline.end - least)
        except Exception:  # of a compiler, or it cannot be captured: nothing is compared with it
            return {}
        if compiled is None:
            return {}
        self._tell("measuring torch.compile's backbone")
        try:
            return measure({chosen: self._runners[chosen], COMPILED: compiled}, batches, self._deadline)
        finally:
            compiled.close()

    def _close_all_but(self, names: Container[str]) -> None:
        for name in [name for name in self._runners if name not in names]:
            self._runners.pop(name).close()


def _alike(runner: Runner, plain: Runner, batches: Sequence[Tensor]) -> bool:
    """Return whether two runners give the same labels and exits, but for 1 in 100 by rounding at a threshold."""
    samples, differing = 0, 0
    for x in batches:
        found, wanted = runner(x), plain(x)
        differing += int(((found.label != wanted.label) | (found.exit_index != wanted.exit_index)).sum())
        samples += len(x)
    return differing <= samples // 100
