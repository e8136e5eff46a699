"""What a strategy is, and what strategies share.

A strategy is one file in ``strategies`` with one function ``search(target)``: a generator that yields what to measure
(``Ask``) and is sent what came out (``Answers``). It sees nothing else and draws nothing at random, so that a sweep
that was interrupted, or runs on records, asks the same again and gets the recorded answers.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping
from itertools import zip_longest
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
#: Neighbours of the fastest of another way to multiply are tried if it takes at most so much of the fastest one's time.
NEAR = 1.2


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

    The fastest of every way to multiply is among those, if it is near: what is the best of a way that looks slower at
    first is many steps away from the others.

    Args:
        target: what is tuned.
        known: what was measured alone.
        asked: what is not to be asked for again, be it known or have it failed.
        leaders: of the fastest, whose neighbours are asked for, one of each in turn.
        at_once: neighbours in a step, at most.
        steps: at most; there are fewer if no neighbour is left.
        rounds: of each.
        shares: of the work that is done before and after.
    """
    asked = set(asked)
    before, after = shares
    for step in range(1, steps + 1):
        beside = [neighbours(best, target.shape) for best in _leaders(known, leaders)]
        left = [[one for one in around if one not in asked] for around in beside]
        in_turn = (one for turn in zip_longest(*left) for one in turn if one is not None)
        new = tuple(dict.fromkeys(in_turn))[:at_once]
        if not new:
            break
        asked.update(new)
        known = {**known, **(yield Ask(ALONE, new, rounds, share=before + (after - before) * step / steps))}
    return known


def _leaders(known: Answers, count: int) -> list[LaunchConfig]:
    """Return the fastest of each way to multiply, if near, then the fastest others; none that differ in caps alone."""
    order = fastest_first(known)
    fastest = over_baseline(known[order[0]])
    different: dict[LaunchConfig, LaunchConfig] = {}
    for one in order:
        if over_baseline(known[one]) > NEAR * fastest:
            break
        different.setdefault(dataclasses.replace(one, max_registers=0, max_programs=0), one)
    of_ways: dict[tuple[bool, bool], LaunchConfig] = {}
    for one in different.values():
        of_ways.setdefault((one.tiled, one.block_n > 1), one)
    return list(dict.fromkeys([*of_ways.values(), *different.values()]))[:count]


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
