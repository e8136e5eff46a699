"""The sweep: asks what a strategy wants to know, measures what no record says, and keeps every finished measurement."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...kernels.launch.launch_config import LaunchConfig
from ..measuring.failures import Failure
from ..measuring.head_timing import AloneTiming
from ..measuring.heads_alone import ALONE, NETWORK, Target
from ..measuring.progress import Status
from ..records.comparison import Paired
from ..records.decisions import Decision
from .config_text import text
from .exclusion import excluded
from .records import SweepRecords
from .search import Answers, Ask, Search, decision, fastest_first

#: Configurations beside the rule's that are measured in the same rounds, alone and in the network, where each is
#: captured with all its activations.
TOGETHER = {ALONE: 32, NETWORK: 8}
_WHERE = {ALONE: "alone", NETWORK: "in situ"}


@dataclass
class Sweep:
    """A search over targets with one strategy."""

    measurer: AloneTiming
    search: Search
    records: SweepRecords
    watch: Callable[[Status], None] = lambda status: None
    failures: Counter[str] = field(default_factory=Counter)
    """Count of failures by kind."""
    tunings: list["Tuning"] = field(default_factory=list)
    """One for each target so far."""

    def run(self, targets: Sequence[Target]) -> None:
        """Tune one target after another."""
        for number, target in enumerate(targets):
            self.tunings.append(Tuning(self, target, number, len(targets)))
            self.tunings[-1].run()


@dataclass
class Tuning:
    """The search for one target: questions of the strategy, and decisions by the last answers in each place."""

    sweep: Sweep
    target: Target
    number: int
    of: int
    """It is the ``number``-th of so many targets, from 0."""
    _done: float = 0.0
    """Share of the work, from 0 to 1."""
    _asked: dict[str, Ask] = field(default_factory=dict)
    """The last question, by place."""
    _decisions: dict[str, Decision[LaunchConfig]] = field(default_factory=dict)
    """Decision by its answers; kept until there are others, since each bootstrap takes its time."""
    _best: str = ""
    _failed: set[tuple[str, LaunchConfig]] = field(default_factory=set)

    def run(self) -> None:
        """Answer all questions of the strategy."""
        steps = self.sweep.search(self.target)
        ask = next(steps, None)
        while ask is not None:
            answers = self._answer(ask)
            self._decide(ask, answers)
            self._done, self._best = ask.share, _best(ask.place, answers) or self._best
            try:
                ask = steps.send(answers)
            except StopIteration:
                break
        self._show("done", 1.0)

    def _decide(self, ask: Ask, answers: Answers) -> None:
        self._asked[ask.place], self._decisions[ask.place] = ask, decision(self.target.rule, answers)

    def add_candidates(self, place: str, configs: Iterable[LaunchConfig | None]) -> bool:
        """Measure further configurations, to be decided between, too; return whether any was new and not excluded."""
        last = self._asked.get(place)
        if last is None or not self.decision(place).times:
            return False
        others = [one for one in dict.fromkeys(configs) if one is not None and one not in last.configs]
        new = tuple(config for config in others if excluded(config, self.target.shape) is None)
        if new:
            answers = {**self.decision(place).times, **self._answer(last._replace(configs=new))}
            self._decide(last._replace(configs=(*last.configs, *new)), answers)
        return bool(new)

    def decision(self, place: str) -> Decision[LaunchConfig]:
        """Return the decision by the last answers."""
        return self._decisions.get(place) or decision(self.target.rule, {})

    def _show(self, doing: str, done: float) -> None:
        self._done = max(done, self._done)
        share = (self.number + self._done) / self.of
        self.sweep.watch(Status(share, f"{self.target}: {doing}", self._best, self.sweep.failures))

    def _answer(self, ask: Ask) -> Answers:
        """Return what is known of the configurations, after measuring what is not; of no network nothing in situ."""
        if ask.place == NETWORK and not self.target.taps:
            return {}
        records = self.sweep.records
        found = {one: records.find(records.blank(self.target, ask, one)) for one in dict.fromkeys(ask.configs)}
        known = {config: result for config, result in found.items() if result is not None}
        missing = [config for config in found if config not in known]
        together = TOGETHER[ask.place]
        for start in range(0, len(missing), together):
            done = self._done + max(ask.share - self._done, 0.0) * start / len(missing)
            self._show(f"{len(missing)} configurations {_WHERE[ask.place]}, {ask.rounds} rounds", done)
            known |= self._measure(ask, missing[start : start + together])
        for config, result in known.items():
            if isinstance(result, Failure) and (ask.place, config) not in self._failed:  # several asks may name it
                self.sweep.failures[result.kind] += 1
                self._failed.add((ask.place, config))
        return {config: result for config, result in known.items() if not isinstance(result, Failure)}

    def _measure(self, ask: Ask, missing: Sequence[LaunchConfig]) -> dict[LaunchConfig, Paired | Failure]:
        """Check and time configurations beside the rule's, and record each."""
        target, measurer, records = self.target, self.sweep.measurer, self.sweep.records
        batch = list(dict.fromkeys([target.rule, *missing]))
        results: dict[LaunchConfig, Paired | Failure] = {**measurer.prepare(target, ask.place, batch)}
        if target.rule not in results:
            left = [config for config in batch if config not in results]
            results |= measurer.time(target, ask.place, left, ask.rounds, ask.captures)
        # not recorded: it is no fault of theirs
        nothing = Failure("no baseline", "the rule's configuration failed")
        return {
            config: records.add(records.blank(target, ask, config), results[config]) if config in results else nothing
            for config in missing  # the rule's may be known
        }


def _best(place: str, answers: Answers) -> str:
    if not answers:
        return ""
    config = fastest_first(answers)[0]
    return f"{text(config)}, {answers[config].over_baseline:.3f} of the rule's time {_WHERE[place]}"


def measure_winners_at_neighbours(tunings: Iterable[Tuning]) -> None:
    """Measure the winner of each batch size at the next smaller and the next larger one, alone and in situ.

    In situ also the winner alone, since the winner in situ is compared with it. Repeated until no winner changes, so
    that in the end every winner was measured at its neighbours, the next sizes among ``tunings``, unless the rules of
    the space exclude it.
    """
    heads: dict[tuple[object, ...], list[Tuning]] = {}
    for tuning in tunings:
        target = tuning.target
        heads.setdefault((target.model, target.taps, *target.shape[1:]), []).append(tuning)
    beside: list[tuple[Tuning, list[Tuning]]] = []
    for sizes in heads.values():
        sizes.sort(key=lambda tuning: tuning.target.shape.samples)
        beside += [(here, sizes[max(at - 1, 0) : at] + sizes[at + 1 : at + 2]) for at, here in enumerate(sizes)]
    new = True
    while new:
        new = False
        for here, others in beside:
            for place in (ALONE, NETWORK):
                found = [other.decision(place).winner for other in others]
                alone = [here.decision(ALONE).winner] if place == NETWORK else []
                new |= here.add_candidates(place, [*found, *alone])
