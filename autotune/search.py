"""What a strategy is, and what strategies share.

A strategy is one file in ``strategies`` with one function ``search(target)``: a generator that yields what to measure
(``Ask``) and is sent what came out (``Answers``). It sees nothing else and draws nothing at random, so that a sweep
that was interrupted, or runs on records, asks the same again and gets the recorded answers.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import NamedTuple

from ..kernels.launch_config import LaunchConfig
from .comparison import Paired, over_baseline, winner
from .measurer import ALONE, Target
from .space import neighbours, simplicity
from .timing import CAPTURES

#: Rounds of what is decided by.
FINAL_ROUNDS = 20
#: Captures of what is measured again: what is 2 % faster is then told from what is not.
AGAIN_CAPTURES = 12
#: Logarithm of what a first step to other caps is expected to cost, so that such steps come late: few are any faster.
CAPS_COST = 0.05


class Ask(NamedTuple):
    """Configurations to measure."""

    place: str
    """``ALONE`` or ``NETWORK``."""
    configs: tuple[LaunchConfig, ...]
    rounds: int
    """Of each capture."""
    share: float
    """About how much of the work on a target is done, from 0 to 1, once this is answered."""
    captures: int = CAPTURES
    next_in_situ: tuple[LaunchConfig, ...] = ()
    """What may be asked for in situ after this, to be compiled meanwhile."""


#: Of what was asked for; what failed is absent, and so is everything if the rule's configuration failed.
Answers = Mapping[LaunchConfig, Paired]
Search = Callable[[Target], Generator[Ask, Answers, None]]


def alone_only(search: Search) -> Search:
    """Return a strategy that ends where another one goes on in situ."""

    def asks(target: Target) -> Generator[Ask, Answers, None]:
        steps = search(target)
        try:
            ask = next(steps)
            while ask.place == ALONE:
                ask = steps.send((yield ask._replace(next_in_situ=())))
        except StopIteration:
            return

    return asks


def climb(
    target: Target, known: Answers, asked: Iterable[LaunchConfig], *, leaders: int, at_once: int, steps: int,
    rounds: int, shares: tuple[float, float],
) -> Generator[Ask, Answers, Answers]:  # fmt: skip
    """Ask for neighbours of the fastest alone, which may be others after each step; return all that is known then.

    Those come first that are fast if what leads to them changes the time as it did elsewhere: a move, as from four
    warps to eight, mostly does to one of the fastest what it did to another.

    Args:
        target: what is tuned.
        known: what was measured alone.
        asked: what is not to be asked for again, be it known or have it failed.
        leaders: of the fastest, whose neighbours are asked for.
        at_once: neighbours in a step, at most.
        steps: at most; there are fewer if no neighbour is left.
        rounds: of each.
        shares: of the work that is done before and after.
    """
    found, seen = dict(known), set(asked)
    before, after = shares
    moves = _Moves()
    for step in range(1, steps + 1):
        expected: dict[LaunchConfig, tuple[float, LaunchConfig]] = {}
        for leader in fastest_first(found)[:leaders]:
            time = math.log(over_baseline(found[leader]))
            for one in neighbours(leader, target.shape):
                if one not in seen:
                    there = time + moves.expected(leader, one)
                    expected[one] = min(expected.get(one, (there, leader)), (there, leader), key=lambda way: way[0])
        new = sorted(expected, key=lambda one: expected[one][0])[:at_once]
        if not new:
            break
        seen.update(new)
        answers = yield Ask(ALONE, tuple(new), rounds, share=before + (after - before) * step / steps)
        for one, answer in answers.items():
            leader = expected[one][1]
            moves.add(leader, one, math.log(over_baseline(answer) / over_baseline(found[leader])))
        found |= answers
    return found


class _Moves:
    """What steps between neighbours have changed so far: logarithms of the ratio of their times, by what differs."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[tuple[str, int, int], ...], list[float]] = {}

    def add(self, here: LaunchConfig, there: LaunchConfig, ratio: float) -> None:
        self._ratios.setdefault(_move(here, there), []).append(ratio)

    def expected(self, here: LaunchConfig, there: LaunchConfig) -> float:
        """Return the mean of such steps and of one that changed nothing, or of those the other way round."""
        forth, back = self._ratios.get(_move(here, there), []), self._ratios.get(_move(there, here), [])
        if forth:
            return sum(forth) / (len(forth) + 1)
        expected = -sum(back) / (len(back) + 1)
        caps = (here.max_registers, here.max_programs) != (there.max_registers, there.max_programs)
        return max(expected, CAPS_COST) if caps else expected


def _move(here: LaunchConfig, there: LaunchConfig) -> tuple[tuple[str, int, int], ...]:
    """Return the fields that differ, from what and to what."""
    one, other = dataclasses.asdict(here), dataclasses.asdict(there)
    return tuple((name, one[name], other[name]) for name in one if one[name] != other[name])


def fastest_first(answers: Answers) -> list[LaunchConfig]:
    """Return the configurations by their time over the baseline's."""
    return sorted(answers, key=lambda config: (over_baseline(answers[config]), simplicity(config)))


def decide(rule: LaunchConfig, answers: Answers) -> LaunchConfig | None:
    """Return the winner; ties go to the rule's configuration and then to the simplest. None if nothing was measured."""
    if not answers:
        return None
    return winner(answers, sorted(answers, key=lambda config: (config != rule, simplicity(config))))


def finalists(target: Target, answers: Answers, count: int) -> tuple[LaunchConfig, ...]:
    """Return the rule's configuration, the winner, and the fastest others, so that there are ``count`` and the rule's.

    The winner is among them, so that it can be compared in situ with what wins there.
    """
    best = [decide(target.rule, answers), *fastest_first(answers)]
    others = dict.fromkeys(config for config in best if config is not None and config != target.rule)
    return (target.rule, *list(others)[:count])
