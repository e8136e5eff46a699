"""Strategies of a sweep: the questions they ask of a measurer, and the answers they get.

A strategy is a generator that yields what to measure (``Ask``) and is sent the times (``Answers``). But for tables it
sees nothing else, and it draws nothing at random, so that a sweep that was interrupted asks the same again and gets the
recorded answers. To add one: a function of a target, a row in ``STRATEGIES``, and what chooses it in command.py.
"""

import dataclasses
import math
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from itertools import zip_longest
from typing import NamedTuple

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.launch_rule import config_by_rule
from ...kernels.launch.library_rule import config_of_library
from ...kernels.launch.tuned_table import BadTable, TunedTable, table_of, tuned_devices
from ..measuring.heads_alone import Target
from ..measuring.timers import CAPTURES, FINAL_ROUNDS
from ..records.comparison import Paired
from ..records.decisions import Decision, simplicity
from ..records.record import BadRecord, grouped
from .space import neighbours, spread_out, way

#: Captures of what is measured again: what is 2 % faster is then told from what is not.
AGAIN_CAPTURES = 12


class Ask(NamedTuple):
    """Configurations to measure."""

    configs: tuple[LaunchConfig, ...]
    rounds: int
    """Timed rounds of each capture."""
    share: float
    """About how much of the work on a target is done, from 0 to 1, once this is answered."""
    captures: int = CAPTURES


#: Times of what was asked for; what failed is absent, and so is everything if the rule's configuration failed.
Answers = Mapping[LaunchConfig, Paired]
Search = Callable[[Target], Generator[Ask, Answers, None]]


def fastest_first(answers: Answers) -> list[LaunchConfig]:
    """Return the configurations by their time over the baseline's."""
    return sorted(answers, key=lambda config: (answers[config].over_baseline, simplicity(vars(config))))


def finalists(target: Target, answers: Answers, count: int) -> tuple[LaunchConfig, ...]:
    """Return the rule's configuration and ``count`` others: the winner, then the fastest."""
    best = [Decision(answers, target.rule).winner, *fastest_first(answers)]
    others = dict.fromkeys(config for config in best if config is not None and config != target.rule)
    return (target.rule, *list(others)[:count])


#: A way to multiply is near whose fastest takes at most so much of the time of the fastest of all.
NEAR = 1.1
#: Logarithm of what a first step to other caps is expected to cost, so that such steps come late: few are any faster.
CAPS_COST = 0.05
#: A climb ends once so many steps in a row leave more than this share of the fastest's time before them.
PATIENCE, WORTH_MORE_STEPS = 2, 0.99


def climb(
    target: Target, known: Answers, asked: Iterable[LaunchConfig], *, leaders: int, at_once: int, steps: int,
    rounds: int, shares: tuple[float, float],
) -> Generator[Ask, Answers, Answers]:  # fmt: skip
    """Ask for neighbours of the fastest, which may be others after each step; return all that is known then.

    Those come first that are fast if what leads to them, as from four warps to eight, changes the time as it did
    elsewhere. The ways to multiply take turns, if the fastest of one is near that of all: the best of a way that looks
    slower at first is many steps away.

    Args:
        target: what is tuned.
        known: what was measured.
        asked: what is not to be asked for again, be it known or have it failed.
        leaders: the number, of each way to multiply, whose neighbours are asked for.
        at_once: neighbours in a step, at most.
        steps: at most; there are fewer if no neighbour is left, or if ``PATIENCE`` in a row gained too little.
        rounds: of each neighbour.
        shares: of the work that is done before and after.
    """
    found, seen = dict(known), set(asked)
    before, after = shares
    moves = _Moves()
    fastest = [_fastest(found)]
    for step in range(1, steps + 1):
        ways = [_beside(target, way[:leaders], found, seen, moves) for way in _near_ways(found)]
        in_turn = (one for turn in zip_longest(*ways) for one in turn if one is not None)
        new = tuple(dict.fromkeys(in_turn))[:at_once]
        if not new:
            break
        seen.update(new)
        answers = yield Ask(new, rounds, share=before + (after - before) * step / steps)
        leaders_of = {one: expected.leader for way in ways for one, expected in way.items()}
        for one, answer in answers.items():
            leader = leaders_of[one]
            moves.add(leader, one, math.log(answer.over_baseline / found[leader].over_baseline))
        found |= answers
        fastest.append(_fastest(found))
        if step >= PATIENCE and fastest[-1] > WORTH_MORE_STEPS * fastest[-1 - PATIENCE]:
            break
    return found


def _fastest(answers: Answers) -> float:
    return min(answer.over_baseline for answer in answers.values())


class _Expected(NamedTuple):
    """The logarithm of a configuration's time over the baseline's, estimated from that of a leader."""

    time: float
    leader: LaunchConfig


def _beside(
    target: Target, leaders: Iterable[LaunchConfig], known: Answers, seen: Container[LaunchConfig], moves: "_Moves"
) -> dict[LaunchConfig, _Expected]:
    """Return the neighbours of leaders that were not seen yet, and what they may take, the fastest first."""
    found: dict[LaunchConfig, _Expected] = {}
    for leader in leaders:
        time = math.log(known[leader].over_baseline)
        for one in neighbours(leader, target.shape):
            if one not in seen:
                expected = _Expected(time + moves.expected(leader, one), leader)
                found[one] = min(found.get(one, expected), expected, key=lambda way: way.time)
    return dict(sorted(found.items(), key=lambda item: item[1].time))


def _near_ways(known: Answers) -> list[list[LaunchConfig]]:
    """Return what is known by the way to multiply, the fastest first, of the ways whose fastest is near that of all."""
    ways = grouped(fastest_first(known), way)
    fastest = [known[its[0]].over_baseline for its in ways.values()]
    return [its for its, first in zip(ways.values(), fastest, strict=True) if first <= NEAR * min(fastest)]


class _Moves:
    """Effects of steps between neighbours so far: logarithms of the ratio of their times, by the fields that differ."""

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
        return expected if here.max_registers == there.max_registers else max(expected, CAPS_COST)


def _move(here: LaunchConfig, there: LaunchConfig) -> tuple[tuple[str, int, int], ...]:
    """Return the fields that differ, from what and to what."""
    one, other = dataclasses.asdict(here), dataclasses.asdict(there)
    return tuple((name, one[name], other[name]) for name in one if one[name] != other[name])


#: Leaders of each way to multiply whose neighbours are timed: others may lead by then.
LEADERS = 12


def shipped_tables() -> list[TunedTable]:
    """Return the tables of all devices.

    Raises:
        BadRecord: one cannot be read.
    """
    try:
        return [table for name in tuned_devices() if (table := table_of(name)) is not None]
    except BadTable as error:
        raise BadRecord(str(error)) from None


def tabled(shape: HeadShape) -> list[LaunchConfig]:
    """Return what the tables of all devices have for a head."""
    return [entry.config for table in shipped_tables() if (entry := table.find(shape)) is not None]


def quick(target: Target) -> Generator[Ask, Answers, None]:
    """Search for 15 seconds: around the rule's configuration and tables', a library's, then beside the fastest.

    A search of ten times that, by halving from 96 configurations on, found what takes 1.1 % less at most, on average
    (20 heads, H200). A dozen spread out are enough: of 66 heads they had the way in which the winner multiplies,
    as 20 had.
    """
    shape = target.shape
    ways = (config_by_rule(shape), config_of_library(shape, shape.classes))  # the rule's is one of them
    configs = tuple(dict.fromkeys([target.rule, *tabled(shape), *ways, *spread_out(shape, 12)]))
    # only looked at in few rounds, since the fastest ones are timed again; captures differ more than rounds do
    looked = yield Ask(configs, rounds=4, share=0.4)
    if not looked:
        return
    looked = yield from climb(
        target, looked, configs, leaders=LEADERS, at_once=12, steps=7, rounds=4, shares=(0.4, 0.8)
    )  # fmt: skip
    yield Ask(finalists(target, looked, 6), FINAL_ROUNDS, share=1.0, captures=AGAIN_CAPTURES)


def tables(target: Target) -> Generator[Ask, Answers, None]:
    """Ask for what the tables of all devices have for a head."""
    configs = tuple(dict.fromkeys([target.rule, *tabled(target.shape)]))
    yield Ask(configs, FINAL_ROUNDS, share=1.0, captures=AGAIN_CAPTURES)


#: Names of strategies; the first finds nothing new, so that there are no winners to be measured elsewhere.
TABLES, QUICK = "tables", "quick"
STRATEGIES: dict[str, Search] = {TABLES: tables, QUICK: quick}
