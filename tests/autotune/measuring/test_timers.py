"""The timers without a GPU: turns, requests, and variants that raise."""

import pytest
import torch
from auxhead.autotune.measuring.timers import VariantFailed, time_captures, time_rounds, time_those_that_run
from support.simulated_cuda import simulated_events


@pytest.fixture(autouse=True)
def events(monkeypatch):
    simulated_events(monkeypatch)


def test_captures_take_turns():
    called = []
    captures = {name: lambda x, name=name: called.append(name) for name in ("a0", "a1", "b")}
    variants = {"a": [captures["a0"], captures["a1"]], "b": [captures["b"]]}
    found = time_captures(variants, [torch.zeros(1)], rounds=5, warm_up=1, repeat=2, requests=3)
    assert {name: called.count(name) for name in captures} == {"a0": 21, "a1": 21, "b": 42}
    assert [len(us) for us in found["a"].host] == [9, 6] and [len(us) for us in found["a"].device] == [3, 2]
    for one in found.values():
        for call_us, host_us in zip(one.call, one.host, strict=True):
            assert all(0 < call <= answer for call, answer in zip(call_us, host_us, strict=True))
    assert found["b"].device == [[500.0] * 5]


def test_what_raises_is_named_and_the_rest_is_timed_again():
    def fails():
        raise ValueError("no")

    asked, failures = [], []
    variants = {"good": [lambda: None], "bad": [lambda: None, fails]}

    def timed(left):
        asked.append(sorted(left))
        return time_rounds(left, torch.device("cpu"), rounds=2, repeat=1)

    with pytest.raises(VariantFailed, match="bad"):
        timed(variants)
    found = time_those_that_run(dict(variants), timed, lambda name, calls, error: failures.append((name, error)))
    assert asked == [["bad", "good"], ["bad", "good"], ["good"]] and found == {"good": [[1000.0] * 2]}
    assert [(name, str(error)) for name, error in failures] == [("bad", "no")]
    assert time_those_that_run({"bad": [fails]}, timed, lambda *failure: None) is None
