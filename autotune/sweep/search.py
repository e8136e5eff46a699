"""Strategies of a sweep: the questions they ask of a measurer, the answers they get, and what they share.

A strategy is one file in ``strategies`` with one function ``search(target)``: a generator that yields what to measure
(``Ask``) and is sent the times (``Answers``). It sees nothing else and draws nothing at random, so that a sweep that
was interrupted, or runs on records, asks the same again and gets the recorded answers.
"""

from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

from ...kernels.launch_config import LaunchConfig
from ..measuring.targets import Target
from ..measuring.timers import CAPTURES
from ..records.comparison import Paired
from ..records.decisions import Decision, simplicity

#: Captures of what is measured again: what is 2 % faster is then told from what is not.
AGAIN_CAPTURES = 12


class Ask(NamedTuple):
    """Configurations to measure."""

    place: str
    """``ALONE`` or ``NETWORK``."""
    configs: tuple[LaunchConfig, ...]
    rounds: int
    """Timed rounds of each capture."""
    share: float
    """About how much of the work on a target is done, from 0 to 1, once this is answered."""
    captures: int = CAPTURES
    next_in_situ: tuple[LaunchConfig, ...] = ()
    """Configurations that may be asked for in situ after this, to be compiled meanwhile."""


#: Times of what was asked for; what failed is absent, and so is everything if the rule's configuration failed.
Answers = Mapping[LaunchConfig, Paired]
Search = Callable[[Target], Generator[Ask, Answers, None]]


def fastest_first(answers: Answers) -> list[LaunchConfig]:
    """Return the configurations by their time over the baseline's."""
    return sorted(answers, key=lambda config: (answers[config].over_baseline, simplicity(vars(config))))


def decision(rule: LaunchConfig, answers: Answers) -> Decision[LaunchConfig]:
    """Decide between configurations by their times."""
    return Decision(answers, rule, vars)


def finalists(target: Target, answers: Answers, count: int) -> tuple[LaunchConfig, ...]:
    """Return the rule's configuration, the winner, and the fastest others, so that there are ``count`` and the rule's.

    The winner is among them, so that it can be compared in situ with what wins there.
    """
    best = [decision(target.rule, answers).winner, *fastest_first(answers)]
    others = dict.fromkeys(config for config in best if config is not None and config != target.rule)
    return (target.rule, *list(others)[:count])
