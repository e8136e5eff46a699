"""What was found for one target: its winners alone and in situ, and how they compare."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ...kernels.launch_config import LaunchConfig
from ..measuring.targets import ALONE, NETWORK, Target
from ..records.comparison import Difference, compare_runs
from .search import Answers, decide


class Outcome(NamedTuple):
    """What a sweep found for one target."""

    target: Target
    rule: LaunchConfig
    """What all was compared with."""
    alone: LaunchConfig | None
    """The winner alone; None if nothing could be measured."""
    alone_over_rule: Difference | None
    network: LaunchConfig | None
    """The winner in situ."""
    over_rule: Difference | None
    """Times of the whole network: the winner in situ against the rule's configuration."""
    over_alone: Difference | None
    """And against the winner alone."""
    failures: Counter[str]
    """By kind."""


def outcome(target: Target, rule: LaunchConfig, answers: Mapping[str, Answers], failures: Counter[str]) -> Outcome:
    """Decide.

    Args:
        target: what was tuned.
        rule: the baseline.
        answers: of each place the measurements that decide.
        failures: by kind.
    """
    alone, network = answers.get(ALONE, {}), answers.get(NETWORK, {})
    best_alone, best = decide(rule, alone), decide(rule, network)
    return Outcome(
        target,
        rule,
        best_alone,
        _between(alone, best_alone, rule),
        best,
        _between(network, best, rule),
        _between(network, best, best_alone),
        failures,
    )


def _between(answers: Answers, one: LaunchConfig | None, other: LaunchConfig | None) -> Difference | None:
    """Compare two configurations, if both were measured."""
    if one is None or other is None or one not in answers or other not in answers:
        return None
    if one == other:
        return Difference(1.0, 1.0, 1.0)
    return compare_runs(answers[one], answers[other])
