"""The sweep: asks what a strategy wants to know, measures what no record says, and keeps every finished measurement."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...kernels.launch_config import LaunchConfig
from ..measuring.failures import Failure
from ..measuring.progress import Status
from ..measuring.targets import ALONE, NETWORK, Measurer, Target
from ..records.comparison import Paired, compare_runs, over_baseline
from .exclusion import excluded
from .outcome import Outcome, outcome
from .records import Book
from .search import AGAIN_CAPTURES, Answers, Ask, Search, decide, fastest_first
from .space import text

#: Configurations beside the rule's that are measured in the same rounds, alone and in the network, where each is
#: captured with all its activations.
TOGETHER = {ALONE: 32, NETWORK: 8}


@dataclass
class Sweep:
    """One run over targets."""

    measurer: Measurer
    search: Search
    book: Book
    watch: Callable[[Status], None] = lambda status: None
    failures: Counter[str] = field(default_factory=Counter)
    tunings: list["Tuning"] = field(default_factory=list)
    """Of the targets that were tuned."""

    def run(self, targets: Sequence[Target]) -> list[Outcome]:
        """Tune the targets, a question of each in turn: while one is measured, what the others ask for is compiled."""
        running = [Tuning(self, target) for target in targets]
        self.tunings += running
        while running:
            tuning = running.pop(0)
            if tuning.go_on():
                running.append(tuning)
        return self.outcomes

    @property
    def outcomes(self) -> list[Outcome]:
        """What was found for each target."""
        return [tuning.outcome for tuning in self.tunings]


@dataclass
class Tuning:
    """The work on one target."""

    sweep: Sweep
    target: Target
    answers: dict[str, Answers] = field(default_factory=dict)
    """Of each place the last ones, which decide."""
    done: float = 0.0
    """Share of the work, from 0 to 1."""
    _asked: dict[str, Ask] = field(default_factory=dict)
    """What they answer."""
    _decided: dict[str, tuple[Answers, LaunchConfig | None]] = field(default_factory=dict)
    """Who wins, and by which answers."""
    _best: str = ""
    _failed: dict[tuple[str, LaunchConfig], str] = field(default_factory=dict)
    """Of what kind, by place."""

    def __post_init__(self) -> None:
        self._steps = self.sweep.search(self.target)
        self._ask = next(self._steps, None)
        self._begin_to_compile()

    def go_on(self) -> bool:
        """Answer what the strategy wants to know next, if anything, and return whether it wants to know more."""
        ask = self._ask
        if ask is not None:
            answers = self._answer(ask)
            self._asked[ask.place], self.answers[ask.place] = ask, answers
            self.done, self._best = ask.share, _best(ask.place, answers) or self._best
            try:
                self._ask = self._steps.send(answers)
            except StopIteration:
                self._ask = None
                for place in (ALONE, NETWORK):
                    self._join_earlier(place)
        if self._ask is None:
            self._tell("done", 1.0)
            return False
        self._begin_to_compile()
        return True

    def _join_earlier(self, place: str) -> None:
        """Decide between all that an earlier search and this one ended with, each in as many captures as either had."""
        earlier = self.sweep.book.decided(self.target, place)
        captures = max((len(one.own) for one in earlier.values()), default=0)
        if place in self._asked and self._asked[place].captures < captures:
            self._time_again(place, captures)
        self.also(place, earlier)

    def _time_again(self, place: str, captures: int) -> None:
        again = self._asked[place] = self._asked[place]._replace(captures=captures)
        self.answers[place] = self._answer(again) or self.answers[place]

    def _begin_to_compile(self) -> None:
        """Compile what is asked for next and not known."""
        if self._ask is not None:
            self._compile_unknown(self._ask, self._ask.configs)

    def _compile_unknown(self, ask: Ask, configs: Iterable[LaunchConfig]) -> None:
        book = self.sweep.book
        unknown = [one for one in configs if book.find(book.of_head(self.target, ask, one)) is None]
        self.sweep.measurer.begin_to_compile(self.target, ask.place, unknown)

    def compile_also(self, place: str, configs: Iterable[LaunchConfig | None]) -> None:
        """Begin to compile what ``also`` may be asked to measure."""
        new = self._not_asked(place, configs)
        if new:
            self._compile_unknown(self._asked[place], new)

    def also(self, place: str, configs: Iterable[LaunchConfig | None]) -> bool:
        """Let further configurations take part in the decision; return whether any of them had not yet, and could."""
        new = self._not_asked(place, configs)
        if new:
            last = self._asked[place]
            self.answers[place] = {**self.answers[place], **self._answer(last._replace(configs=new))}
            self._asked[place] = last._replace(configs=(*last.configs, *new))
        return bool(new)

    def look_again(self) -> bool:
        """Measure in more captures, once, what was decided between in situ if it is in doubt; return whether it was.

        It is where the winner looks slower than what wins alone. It may be tied with the fastest as one of many, and
        yet slower than this one as one of two.
        """
        last, found = self._asked.get(NETWORK), self.answers.get(NETWORK, {})
        here, alone = self.winner(NETWORK), self.winner(ALONE)
        if last is None or here is None or alone is None or alone not in found or last.captures >= AGAIN_CAPTURES:
            return False
        over_alone = compare_runs(found[here], found[alone])
        if over_alone.is_tie or over_alone.median_ratio < 1.0:
            return False
        self._time_again(NETWORK, AGAIN_CAPTURES)
        return True

    def _not_asked(self, place: str, configs: Iterable[LaunchConfig | None]) -> tuple[LaunchConfig, ...]:
        """Return those that take no part in the decision in that place yet, and could."""
        last = self._asked.get(place)
        if last is None or not self.answers[place]:
            return ()
        others = [one for one in dict.fromkeys(configs) if one is not None and one not in last.configs]
        return tuple(config for config in others if excluded(config, self.target.shape) is None)

    def winner(self, place: str) -> LaunchConfig | None:
        """Return the winner as it is now; None if nothing was measured."""
        answers = self.answers.get(place, {})
        of, decided = self._decided.get(place, (None, None))
        if of is not answers:  # the last ones decide until there are others: a bootstrap each takes its time
            decided = decide(self.target.rule, answers)
            self._decided[place] = answers, decided
        return decided

    @property
    def outcome(self) -> Outcome:
        """What was found."""
        return outcome(self.target, self.target.rule, self.answers, Counter(self._failed.values()))

    def _tell(self, doing: str, done: float) -> None:
        self.done = max(done, self.done)
        tunings = self.sweep.tunings
        share = sum(tuning.done for tuning in tunings) / len(tunings)
        self.sweep.watch(Status(share, f"{self.target}: {doing}", self._best, self.sweep.failures))

    def _answer(self, ask: Ask) -> Answers:
        """Return what is known of the configurations, after measuring what is not."""
        book = self.sweep.book
        found = {config: book.find(book.of_head(self.target, ask, config)) for config in dict.fromkeys(ask.configs)}
        known = {config: result for config, result in found.items() if result is not None}
        missing = [config for config in found if config not in known]
        if missing:
            self.sweep.measurer.begin_to_compile(self.target, NETWORK, ask.next_in_situ)
        together = TOGETHER[ask.place]
        for start in range(0, len(missing), together):
            done = self.done + max(ask.share - self.done, 0.0) * start / len(missing)
            where = "alone" if ask.place == ALONE else "in situ"
            self._tell(f"{len(missing)} configurations {where}, {ask.rounds} rounds", done)
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
        measurer, book = self.sweep.measurer, self.sweep.book
        batch = list(dict.fromkeys([rule, *missing]))
        results: dict[LaunchConfig, Paired | Failure] = {}

        def settle(config: LaunchConfig, result: Paired | Failure) -> None:
            if config in missing:  # the rule's may be known
                result = book.add(book.of_head(target, ask, config), result)
            results[config] = result

        for step in (measurer.compile, measurer.check):
            for config, failure in step(target, ask.place, batch).items():
                settle(config, failure)
            batch = [config for config in batch if config not in results]
            if rule in results:
                break
        else:
            time = measurer.alone if ask.place == ALONE else measurer.in_situ
            for config, result in time(target, batch, ask.rounds, ask.captures).items():
                settle(config, result)
        # not recorded: it is no fault of theirs
        nothing = Failure("no baseline", "the rule's configuration failed")
        return {config: results.get(config, nothing) for config in missing}


def _best(place: str, answers: Answers) -> str:
    if not answers:
        return ""
    config = fastest_first(answers)[0]
    where = "alone" if place == ALONE else "in situ"
    return f"{text(config)}, {over_baseline(answers[config]):.3f} of the rule's time {where}"
