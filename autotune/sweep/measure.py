"""The sweep: asks what a strategy wants to know, measures what no record says, and keeps every finished measurement."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...kernels.launch.launch_config import LaunchConfig
from ..measuring.failures import Failure
from ..measuring.head_timing import HeadTiming
from ..measuring.heads_alone import Target
from ..measuring.progress import Status
from ..records.comparison import Paired
from ..records.decisions import Decision
from ..records.record import grouped
from .config_text import text
from .exclusion import excluded
from .records import SweepRecords
from .search import Answers, Ask, Search, fastest_first

#: Configurations beside the rule's that are measured in the same rounds.
TOGETHER = 32


@dataclass
class Sweep:
    """A search over targets with one strategy."""

    measurer: HeadTiming
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
    """The search for one target: questions of the strategy, and the decision by the last answers."""

    sweep: Sweep
    target: Target
    number: int
    of: int
    """It is the ``number``-th of so many targets, from 0."""
    _done: float = 0.0
    """Share of the work, from 0 to 1."""
    _asked: Ask | None = None
    """The last question."""
    decision: Decision[LaunchConfig] = field(init=False)
    """By its answers; kept until there are others, since each bootstrap takes its time."""
    _best: str = ""
    _failed: set[LaunchConfig] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.decision = Decision({}, self.target.rule)

    def run(self) -> None:
        """Answer all questions of the strategy."""
        steps = self.sweep.search(self.target)
        ask = next(steps, None)
        while ask is not None:
            answers = self._answer(ask)
            self._decide(ask, answers)
            self._done, self._best = ask.share, _best(answers) or self._best
            try:
                ask = steps.send(answers)
            except StopIteration:
                break
        self._show("done", 1.0)

    def _decide(self, ask: Ask, answers: Answers) -> None:
        self._asked, self.decision = ask, Decision(answers, self.target.rule)

    def add_candidates(self, configs: Iterable[LaunchConfig | None]) -> bool:
        """Measure further configurations, to be decided between, too; return whether any was new and not excluded."""
        last = self._asked
        if last is None or not self.decision.times:
            return False
        others = [one for one in dict.fromkeys(configs) if one is not None and one not in last.configs]
        new = tuple(config for config in others if excluded(config, self.target.shape) is None)
        if new:
            answers = {**self.decision.times, **self._answer(last._replace(configs=new))}
            self._decide(last._replace(configs=(*last.configs, *new)), answers)
        return bool(new)

    def _show(self, doing: str, done: float) -> None:
        self._done = max(done, self._done)
        share = (self.number + self._done) / self.of
        self.sweep.watch(Status(share, f"{self.target}: {doing}", self._best, self.sweep.failures))

    def _answer(self, ask: Ask) -> Answers:
        """Return what is known of the configurations, after measuring what is not."""
        records = self.sweep.records
        found = {one: records.find(records.blank(self.target, ask, one)) for one in dict.fromkeys(ask.configs)}
        known = {config: result for config, result in found.items() if result is not None}
        missing = [config for config in found if config not in known]
        for start in range(0, len(missing), TOGETHER):
            done = self._done + max(ask.share - self._done, 0.0) * start / len(missing)
            self._show(f"{len(missing)} configurations, {ask.rounds} rounds", done)
            known |= self._measure(ask, missing[start : start + TOGETHER])
        for config, result in known.items():
            if isinstance(result, Failure) and config not in self._failed:  # several asks may name it
                self.sweep.failures[result.kind] += 1
                self._failed.add(config)
        return {config: result for config, result in known.items() if not isinstance(result, Failure)}

    def _measure(self, ask: Ask, missing: Sequence[LaunchConfig]) -> dict[LaunchConfig, Paired | Failure]:
        """Check and time configurations beside the rule's, and record each."""
        target, measurer, records = self.target, self.sweep.measurer, self.sweep.records
        batch = list(dict.fromkeys([target.rule, *missing]))
        results: dict[LaunchConfig, Paired | Failure] = {**measurer.prepare(target, batch)}
        if target.rule not in results:
            left = [config for config in batch if config not in results]
            results |= measurer.time(target, left, ask.rounds, ask.captures)
        # not recorded: it is no fault of theirs
        nothing = Failure("no baseline", "the rule's configuration failed")
        return {
            config: records.add(records.blank(target, ask, config), results[config]) if config in results else nothing
            for config in missing  # the rule's may be known
        }


def _best(answers: Answers) -> str:
    if not answers:
        return ""
    config = fastest_first(answers)[0]
    return f"{text(config)}, {answers[config].over_baseline:.3f} of the rule's time"


def measure_winners_at_neighbours(tunings: Iterable[Tuning]) -> None:
    """Measure the winner of each batch size at the next smaller and the next larger one.

    Repeated until no winner changes, so that in the end every winner was measured at its neighbours, the next sizes
    among ``tunings``, unless the rules of the space exclude it.
    """
    heads = grouped(tunings, lambda one: (one.target.model, one.target.taps, *one.target.shape[1:]))
    beside: list[tuple[Tuning, list[Tuning]]] = []
    for sizes in heads.values():
        sizes.sort(key=lambda tuning: tuning.target.shape.samples)
        beside += [(here, sizes[max(at - 1, 0) : at] + sizes[at + 1 : at + 2]) for at, here in enumerate(sizes)]
    new = True
    while new:
        new = False
        for here, others in beside:
            new |= here.add_candidates([other.decision.winner for other in others])
