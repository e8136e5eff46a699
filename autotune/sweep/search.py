"""What a strategy is, and what strategies share.

A strategy is one file in ``strategies`` with one function ``search(target)``: a generator that yields what to measure
(``Ask``) and is sent what came out (``Answers``). It sees nothing else and draws nothing at random, so that a sweep
that was interrupted, or runs on records, asks the same again and gets the recorded answers.
"""

from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

from ...kernels.launch_config import LaunchConfig
from ..measuring.targets import Target
from ..measuring.timers import CAPTURES
from ..records.comparison import Paired, over_baseline, winner
from .space import simplicity

#: Captures of what is measured again: what is 2 % faster is then told from what is not.
AGAIN_CAPTURES = 12


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
