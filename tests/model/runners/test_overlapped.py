"""Taps at which heads leave the trunk of the overlapped runner, by rule and as they are asked for."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, OverlappedRunner
from auxhead.model.runners.overlapped import fork_choices, forks_by_rule
from support.example_models import SmallNet, plain_heads


def test_heads_fork_where_enough_of_the_trunk_is_left() -> None:
    blocks = [42.0, 16, 18, 16, 17, 16, 22, 20, 3]  # like ResNet-18 with a head after every block
    assert forks_by_rule(blocks, samples=1, classes=1000) == [5] == forks_by_rule(blocks, samples=128, classes=10)
    assert forks_by_rule(blocks, samples=1, classes=10) == [1, 3, 5] == forks_by_rule(blocks, samples=32, classes=1000)
    stages = [50.0, 30, 30, 40]
    assert forks_by_rule(stages, samples=128, classes=10) == [2], "the last of three stages has a fourth to hide behind"
    assert forks_by_rule([100.0, 1], samples=1, classes=10) == [], "a head at the end runs with the classifier"


@pytest.mark.parametrize("last", range(9))
@pytest.mark.parametrize("samples", [1, 32, 128])
def test_what_the_rule_chooses_is_one_of_the_choices(last: int, samples: int) -> None:
    choices = fork_choices(last)
    for classes in (10, 1000):
        assert forks_by_rule([10.0] * (last + 1) + [40.0, 1.0], samples, classes) in choices
    assert choices == sorted(choices, key=len) and len({tuple(choice) for choice in choices}) == len(choices)
    assert choices[0] == [last] and choices[-1] == list(range(last + 1))


@pytest.mark.parametrize(
    ("forks", "kind", "message"),
    [
        (("block0", "block9"), ValueError, "got 'block9', wants taps of the network: block0, block1, block2"),
        ((0,), ValueError, "got 0, wants taps"),
        ("block0", TypeError, "got 'block0', wants a sequence of taps, or None"),
        (1, TypeError, "got 1, wants a sequence"),
    ],
    ids=str,
)
def test_forks_are_taps(forks: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"forks: {message}"):
        OverlappedRunner(EarlyExitNetwork(SmallNet(), plain_heads(), 1.0).eval(), torch.randn(1, 3, 8, 8), forks=forks)
