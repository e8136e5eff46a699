"""The choice among measured runners, and the candidates there are."""

import random
from types import SimpleNamespace

import pytest
import torch
from auxhead.model.auto import candidates as candidates_module
from auxhead.model.auto.candidates import Candidate, SharedTrunks, candidates, choose, slower
from support.planner_fakes import FakeTrunk

PLAIN = "overlapped (1 fork)"


def passes(median: float, noise: float = 0.0, count: int = 12, seed: int = 0) -> list[float]:
    noisy = random.Random(seed)
    return [median * (1 + noisy.uniform(-noise, noise)) for _ in range(count)]


@pytest.mark.parametrize(
    ("us", "chosen"),
    [
        ({"serial": 100, PLAIN: 100, "polled": 100}, PLAIN),
        ({"serial": 99.5, PLAIN: 100, "polled": 99.4}, PLAIN),
        ({"serial": 97.5, PLAIN: 100, "polled": 97.4}, "serial"),
        ({"serial": 104, PLAIN: 100, "polled": 99.5}, PLAIN),
        ({"serial": 104, PLAIN: 100, "polled": 60}, "polled"),
        ({"serial": 104, PLAIN: 100, "polled": 60.3, "gated": 60}, "polled"),
        ({"serial": 104, PLAIN: 100, "polled": 63, "gated": 60}, "gated"),
        ({"serial": 104, PLAIN: 100, "polled": 180, "gated": 170}, PLAIN),
        ({PLAIN: 100}, PLAIN),
        ({"serial": 100}, "serial"),
    ],
    ids=str,
)
def test_the_plain_graph_or_the_simplest_of_what_beats_it(us: dict[str, float], chosen: str) -> None:
    assert (
        choose({name: passes(float(time)) for name, time in us.items()}, PLAIN if PLAIN in us else "serial") == chosen
    )


def test_the_plain_graph_is_chosen_though_others_tie_with_a_noisy_winner() -> None:
    """The fastest is faster in half of the passes only; serial, slower than the plain graph in all, ties with it."""
    us = {"serial": [102.0] * 12, PLAIN: [100.0] * 12, "polled": [95.0] * 7 + [103.0] * 5}
    assert slower(us["serial"], us[PLAIN]) and not slower(us["serial"], us["polled"])
    assert choose(us, PLAIN) == PLAIN


def test_as_few_wins_as_a_coin_seldom_has() -> None:
    """Of 12 tosses 11 or 12 heads have a chance of 13 in 4,096 and 10 or more one of 79; 0.5 % is the limit."""
    for losses, beyond in ((0, True), (1, True), (2, False)):
        assert slower([100.0] * 12, [90.0] * (12 - losses) + [140.0] * losses) == beyond
        assert slower([1.0] * 12, [0.9] * (12 - losses) + [1.4] * losses) == beyond, "whatever the unit"
    for passes, enough in ((7, False), (8, True)):  # 1 in 128 and in 256
        assert slower([100.0] * passes, [50.0] * passes) == enough
    assert not slower([100.0] * 10, [90.0] * 8 + [100.0] * 2), "a draw is no win: 56 in 1,024"
    assert slower([101.0] * 12, [100.0] * 12) and not slower([100.99] * 12, [100.0] * 12), "1 % is the least"


def test_drift_that_touches_both_is_no_difference_and_hides_none() -> None:
    drift = [100.0 + 10 * index for index in range(12)]
    assert not slower(drift, drift)
    assert slower([us * 1.03 for us in drift], drift)


@pytest.mark.parametrize("count", [8, 12, 40])
def test_equal_runners_seldom_look_different(count: int) -> None:
    noisy = random.Random(1)
    found = sum(
        slower([noisy.gauss(100, 4) for _ in range(count)], [noisy.gauss(100, 4) for _ in range(count)])
        for _ in range(1000)
    )
    assert found <= 10


def test_candidates_from_the_simplest_on() -> None:
    taps = ("a", "b", "c", "d", "e")
    found = candidates(taps, ("b", "d"), smaller=(1, 8), trunk="as_is")
    assert [candidate.name for candidate in found] == [
        "serial",
        "overlapped (1 fork)",
        "overlapped (2 forks)",
        "overlapped (4 forks)",
        "polled",
        "gated",
        "polled (compact)",
    ]
    assert [candidate.forks for candidate in found[:4]] == [(), ("d",), ("b", "d"), ("a", "b", "c", "d")]
    assert found[4:] == [
        Candidate("polled"), Candidate("gated"), Candidate("polled", compact=True),
    ]  # fmt: skip


def test_candidates_where_nothing_can_be_hidden_or_gathered() -> None:
    names = [candidate.name for candidate in candidates(("a", "b"), (), smaller=(), trunk="as_is")]
    assert names == ["serial", "polled", "gated"]
    on_cudnn = [candidate.name for candidate in candidates(("a", "b"), ("a",), smaller=(), trunk="cudnn")]
    assert on_cudnn[:2] == ["serial on cudnn", "overlapped (1 fork) on cudnn"]


@pytest.mark.parametrize(
    ("exits", "stops", "moves"),
    [
        ([[3, 3], [3, 3]], "no batch of the example leaves early", "no sample of the example leaves early"),
        ([[0, 3], [3, 2]], "no batch of the example leaves early", None),
        ([[3, 3], [2, 0]], None, None),
        ([[0, 0]], None, None),
    ],
    ids=str,
)
def test_what_stops_is_worth_making_where_a_batch_leaves_early(
    exits: list[list[int]], stops: str | None, moves: str | None
) -> None:
    for found, why in (
        (Candidate("polled"), stops),
        (Candidate("gated", trunk="cudnn"), stops),
        (Candidate("polled", compact=True), moves),
        (Candidate("overlapped", ("a",)), None),
        (Candidate("overlapped"), None),
    ):
        assert found.needless(torch.tensor(exits), taps=3) == why


@pytest.mark.parametrize("branches", [True, False])
def test_a_trunk_that_another_batch_size_has_chosen_is_known_to_have_branches(branches: bool) -> None:
    made = {"cudnn": FakeTrunk(object(), "cudnn", (), branches)}
    trunks = SharedTrunks(None, torch.zeros(2, 3), "auto", made)  # type: ignore[arg-type]
    assert trunks.is_known("branched") == branches
    assert not SharedTrunks(None, torch.zeros(2, 3), "cudnn", made).is_known("branched")  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", ["traced", "run"])
def test_a_backbone_that_cannot_be_compiled_alone_is_not_compared_with(fails: str, monkeypatch) -> None:
    def failing(*_args: object) -> None:
        raise TypeError("unhashable type: non-nested SymInt")

    made = FakeTrunk(object(), "inductor", (), branches=False)
    monkeypatch.setattr(candidates_module, "begin_trunk", lambda *_args: lambda: made)
    monkeypatch.setattr(candidates_module, "whole", failing if fails == "traced" else lambda _backbone: failing)
    network, x = SimpleNamespace(backbone=None, taps=(), reading=None), torch.zeros(2, 3)
    trunks = SharedTrunks(network, x, "auto", {})  # type: ignore[arg-type]
    trunks._workers = trunks._beside = SimpleNamespace(take=None, wait=bool, close=bool)  # type: ignore[assignment]
    trunks.begin_compiling()
    assert trunks.get("inductor") is made
    assert trunks.compiled_backbone(x, 0.0) is None
