"""The sweep: asks what a strategy wants to know, measures what no record says, and keeps every finished measurement."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...kernels.launch.launch_config import LaunchConfig
from ..measuring.failures import Failure
from ..measuring.progress import Status
from ..measuring.targets import ALONE, NETWORK, Target
from ..records.comparison import Paired
from ..records.decisions import Decision
from .config_text import text
from .exclusion import excluded
from .records import SweepRecords
from .search import AGAIN_CAPTURES, Answers, Ask, Search, decision, fastest_first
from .winners import HeadWinners

#: Configurations beside the rule's that are measured in the same rounds, alone and in the network, where each is
#: captured with all its activations.
TOGETHER = {ALONE: 32, NETWORK: 8}
_WHERE = {ALONE: "alone", NETWORK: "in situ"}


class Measurer(Protocol):
    """Measures configurations of a target in one place, ``ALONE`` or ``NETWORK``: on a GPU, or by records.

    The first configuration of a call is the rule's. It is the baseline: where it fails, nothing is timed.
    """

    def begin_to_compile(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> None:
        """Compile beside whatever else is measured, if that can be; ``compile`` is asked for them later."""
        ...

    def compile(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Compile in parallel, ahead of timing, and return what failed."""
        ...

    def check(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Compare answers with the truth while other work runs beside, and return what failed."""
        ...

    def time(
        self, target: Target, place: str, configs: Sequence[LaunchConfig], rounds: int, captures: int
    ) -> Mapping[LaunchConfig, Paired | Failure]:
        """Time each in fresh captures and all in the same rounds: microseconds of a launch alone, or of the network."""
        ...


@dataclass
class Sweep:
    """A search over targets with one strategy."""

    measurer: Measurer
    search: Search
    records: SweepRecords
    watch: Callable[[Status], None] = lambda status: None
    failures: Counter[str] = field(default_factory=Counter)
    """Count of failures by kind."""
    tunings: list["Tuning"] = field(default_factory=list)
    """One for each target so far."""

    def run(self, targets: Sequence[Target]) -> list[HeadWinners]:
        """Tune targets, a question of each in turn: while one is measured, what the others ask for is compiled."""
        running = [Tuning(self, target) for target in targets]
        self.tunings += running
        while running:
            tuning = running.pop(0)
            if tuning.answer_next():
                running.append(tuning)
        return self.winners

    @property
    def winners(self) -> list[HeadWinners]:
        """Winners of each target."""
        return [tuning.winners for tuning in self.tunings]


@dataclass
class Tuning:
    """The search for one target: questions of the strategy, and decisions by the last answers in each place."""

    sweep: Sweep
    target: Target
    done: float = 0.0
    """Share of the work, from 0 to 1."""
    _asked: dict[str, Ask] = field(default_factory=dict)
    """The last question, by place."""
    _decisions: dict[str, Decision[LaunchConfig]] = field(default_factory=dict)
    """Decision by its answers; kept until there are others, since each bootstrap takes its time."""
    _best: str = ""
    _failed: dict[tuple[str, LaunchConfig], str] = field(default_factory=dict)
    """Kinds of failures, by place and configuration."""

    def __post_init__(self) -> None:
        self._steps = self.sweep.search(self.target)
        self._ask = next(self._steps, None)
        self._begin_to_compile(self._ask)

    def answer_next(self) -> bool:
        """Answer the strategy's question, if it has one, and return whether it has another."""
        ask = self._ask
        if ask is not None:
            answers = self._answer(ask)
            self._decide(ask, answers)
            self.done, self._best = ask.share, _best(ask.place, answers) or self._best
            try:
                self._ask = self._steps.send(answers)
            except StopIteration:
                self._ask = None
                for place in (ALONE, NETWORK):
                    self._join_earlier(place)
        if self._ask is None:
            self._show("done", 1.0)
            return False
        self._begin_to_compile(self._ask)
        return True

    def _join_earlier(self, place: str) -> None:
        """Decide between all that an earlier search and this one ended with, each in as many captures as either had."""
        earlier = self.sweep.records.deciding(self.target, place)
        self._time_again(place, max((len(one.own) for one in earlier.values()), default=0))
        self.add_candidates(place, earlier)

    def _time_again(self, place: str, captures: int) -> None:
        """Answer the last question there in more captures, if it was asked in fewer."""
        if place in self._asked and self._asked[place].captures < captures:
            again = self._asked[place]._replace(captures=captures)
            self._decide(again, self._answer(again) or self.decision(place).times)

    def _decide(self, ask: Ask, answers: Answers) -> None:
        self._asked[ask.place], self._decisions[ask.place] = ask, decision(self.target.rule, answers)

    def _begin_to_compile(self, ask: Ask | None) -> None:
        """Begin to compile what is asked for and not known."""
        if ask is not None:
            unknown = [one for one in ask.configs if self._known(ask, one) is None]
            self.sweep.measurer.begin_to_compile(self.target, ask.place, unknown)

    def _known(self, ask: Ask, config: LaunchConfig) -> Paired | Failure | None:
        records = self.sweep.records
        return records.find(records.blank(self.target, ask, config))

    def compile_candidates(self, place: str, configs: Iterable[LaunchConfig | None]) -> None:
        """Begin to compile what ``add_candidates`` may be given."""
        new = self._not_asked(place, configs)
        if new:
            self._begin_to_compile(self._asked[place]._replace(configs=new))

    def add_candidates(self, place: str, configs: Iterable[LaunchConfig | None]) -> bool:
        """Measure further configurations, to be decided between, too; return whether any was new and not excluded."""
        new = self._not_asked(place, configs)
        if new:
            last = self._asked[place]
            answers = {**self.decision(place).times, **self._answer(last._replace(configs=new))}
            self._decide(last._replace(configs=(*last.configs, *new)), answers)
        return bool(new)

    def remeasure_if_in_doubt(self) -> bool:
        """Measure the candidates in situ again, in more captures, if their winner looks slower than the one alone.

        As one of many it may be tied with the fastest, and yet be slower than that one as one of two. Return whether
        there was such doubt.
        """
        last = self._asked.get(NETWORK)
        if last is None or last.captures >= AGAIN_CAPTURES:
            return False
        in_situ = self.decision(NETWORK)
        over_alone = in_situ.compare(in_situ.winner, self.decision(ALONE).winner)
        if over_alone is None or over_alone.is_tie or over_alone.median_ratio < 1.0:
            return False
        self._time_again(NETWORK, AGAIN_CAPTURES)
        return True

    def _not_asked(self, place: str, configs: Iterable[LaunchConfig | None]) -> tuple[LaunchConfig, ...]:
        """Return those that are no candidates in that place yet, and could be."""
        last = self._asked.get(place)
        if last is None or not self.decision(place).times:
            return ()
        others = [one for one in dict.fromkeys(configs) if one is not None and one not in last.configs]
        return tuple(config for config in others if excluded(config, self.target.shape) is None)

    def decision(self, place: str) -> Decision[LaunchConfig]:
        """Return the decision by the last answers."""
        return self._decisions.get(place) or decision(self.target.rule, {})

    @property
    def winners(self) -> HeadWinners:
        """The winners in both places."""
        failures = Counter(self._failed.values())
        return HeadWinners.of(self.target, self.decision(ALONE), self.decision(NETWORK), failures)

    def _show(self, doing: str, done: float) -> None:
        self.done = max(done, self.done)
        tunings = self.sweep.tunings
        share = sum(tuning.done for tuning in tunings) / len(tunings)
        self.sweep.watch(Status(share, f"{self.target}: {doing}", self._best, self.sweep.failures))

    def _answer(self, ask: Ask) -> Answers:
        """Return what is known of the configurations, after measuring what is not."""
        found = {one: self._known(ask, one) for one in dict.fromkeys(ask.configs)}
        known = {config: result for config, result in found.items() if result is not None}
        missing = [config for config in found if config not in known]
        if missing:
            self.sweep.measurer.begin_to_compile(self.target, NETWORK, ask.next_in_situ)
        together = TOGETHER[ask.place]
        for start in range(0, len(missing), together):
            done = self.done + max(ask.share - self.done, 0.0) * start / len(missing)
            self._show(f"{len(missing)} configurations {_WHERE[ask.place]}, {ask.rounds} rounds", done)
            known |= self._measure(ask, missing[start : start + together])
        answers = {}
        for config, result in known.items():
            if isinstance(result, Failure):
                if (ask.place, config) not in self._failed:  # several asks may name it
                    self.sweep.failures[result.kind] += 1
                    self._failed[ask.place, config] = result.kind
            else:
                answers[config] = result
        return answers

    def _measure(self, ask: Ask, missing: Sequence[LaunchConfig]) -> dict[LaunchConfig, Paired | Failure]:
        """Compile, check and time configurations beside the rule's, and record each."""
        target, rule = self.target, self.target.rule
        measurer, records = self.sweep.measurer, self.sweep.records
        batch = list(dict.fromkeys([rule, *missing]))
        results: dict[LaunchConfig, Paired | Failure] = {}

        def settle(config: LaunchConfig, result: Paired | Failure) -> None:
            if config in missing:  # the rule's may be known
                result = records.add(records.blank(target, ask, config), result)
            results[config] = result

        for step in (measurer.compile, measurer.check):
            for config, failure in step(target, ask.place, batch).items():
                settle(config, failure)
            batch = [config for config in batch if config not in results]
            if rule in results:
                break
        else:
            for config, result in measurer.time(target, ask.place, batch, ask.rounds, ask.captures).items():
                settle(config, result)
        # not recorded: it is no fault of theirs
        nothing = Failure("no baseline", "the rule's configuration failed")
        return {config: results.get(config, nothing) for config in missing}


def _best(place: str, answers: Answers) -> str:
    if not answers:
        return ""
    config = fastest_first(answers)[0]
    return f"{text(config)}, {answers[config].over_baseline:.3f} of the rule's time {_WHERE[place]}"


def measure_winners_at_neighbours(tunings: Iterable[Tuning]) -> None:
    """Measure the winner of each batch size at the next smaller and the next larger one, alone and in situ.

    In situ also the winner alone, since the winner in situ is compared with it; where that looks slower, all candidates
    are measured again. Repeated until no winner changes, so that in the end every winner was measured at its
    neighbours, the next sizes among ``tunings``, unless the rules of the space exclude it.
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
        wanted = [(here, others, place) for here, others in beside for place in (ALONE, NETWORK)]
        for here, others, place in wanted:  # one is measured while others are compiled
            here.compile_candidates(place, _winners(here, others, place))
        new = any([here.add_candidates(place, _winners(here, others, place)) for here, others, place in wanted]) or any(
            [here.remeasure_if_in_doubt() for here, _ in beside]
        )


def _winners(here: Tuning, others: Sequence[Tuning], place: str) -> list[LaunchConfig | None]:
    """Return what is to be measured here: the winners there, and in situ also the winner alone here."""
    found = [other.decision(place).winner for other in others]
    return found if place == ALONE else [*found, here.decision(ALONE).winner]
