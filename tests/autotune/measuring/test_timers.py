"""The timers without a GPU: turns, requests, and variants that raise."""

from functools import partial

import pytest
import torch
from auxhead.autotune.measuring.timers import VariantFailed, time_captures, time_rounds, time_those_that_run
from support.device_clock import pretended_device
from support.simulated_cuda import simulated_events


class Kept:
    """An answer whose end takes the host a while."""

    def __init__(self, clock):
        self.clock = clock

    def __del__(self):
        self.clock.us += 3.0


def test_times_are_those_of_the_call_of_the_answer_and_of_the_device(monkeypatch):
    """A call takes the host 2 us; from an idle device, the answer is there when the device has done its work, too."""
    clock = pretended_device(monkeypatch, "auxhead.autotune.measuring.timers")
    device_us, called = {"a": 50.0, "b": 7.0, "c": 20.0}, []

    def call(name, x):
        called.append((name, int(x)))
        clock.us += 2.0
        clock.launch(device_us[name])
        return Kept(clock)

    variants = {name: [partial(call, name)] for name in device_us}
    inputs = [torch.tensor(index) for index in range(3)]
    found = time_captures(variants, inputs, rounds=6, warm_up=1, repeat=4, requests=2)
    for name, us in device_us.items():
        assert found[name].call == [[pytest.approx(2.0)] * 12]
        assert found[name].host == [[pytest.approx(2.0 + us)] * 12]
    rounds = [called[start : start + 24] for start in range(0, len(called), 24)]  # of three variants, 8 calls each
    assert [{x for _, x in one} for one in rounds] == [{2}, {0}, {1}, {2}, {0}, {1}, {2}]
    assert len({tuple(dict.fromkeys(name for name, _ in one)) for one in rounds}) > 1, "in another order"


def test_a_device_that_is_never_idle_tells_its_own_time(monkeypatch):
    clock = pretended_device(monkeypatch, "auxhead.autotune.measuring.timers")
    called = []

    def call(name, us):
        called.append(name)
        clock.us += 2.0
        clock.launch(us)

    variants = {name: [partial(call, name, us)] * 2 for name, us in (("a", 50.0), ("b", 7.0), ("c", 20.0))}
    found = time_rounds(variants, torch.device("cpu"), rounds=4, repeat=3)
    assert found == {name: [[pytest.approx(us)] * 4] * 2 for name, us in (("a", 50.0), ("b", 7.0), ("c", 20.0))}
    rounds = [tuple(called[start : start + 24 : 4]) for start in range(0, len(called), 24)]
    assert len(rounds) == 5 and len(set(rounds)) > 1, "in another order"


@pytest.mark.usefixtures("events")
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


@pytest.fixture
def events(monkeypatch):
    simulated_events(monkeypatch)


@pytest.mark.usefixtures("events")
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
