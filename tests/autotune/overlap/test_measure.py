"""Measuring overlap without a GPU: captures, checks, timing and profiling are simulated."""

import importlib
import itertools
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.measuring.cells import NEVER
from auxhead.autotune.measuring.failures import WrongAnswer
from auxhead.autotune.measuring.subject import subject_of
from auxhead.autotune.overlap.network_parts import BARE, BOTH, HEADS, NetworkParts
from auxhead.kernels import runs_triton
from auxhead.kernels.launch.residency import is_recording, new_turns
from auxhead.model import EarlyExitNetwork
from auxhead.model.runners.overlapped import OverlappedRunner
from support.example_models import SmallNet, plain_heads
from support.example_traces import replay, trace_of
from support.simulated_cuda import simulated_chains

alone_head = importlib.import_module("auxhead.autotune.measuring.heads_alone")
measurement = importlib.import_module("auxhead.autotune.overlap.measure")
network_parts = importlib.import_module("auxhead.autotune.overlap.network_parts")
timers = importlib.import_module("auxhead.autotune.measuring.timers")


@pytest.fixture
def subject(monkeypatch):
    """A small network; streams and graphs that are none, and kernels that are interpreted."""
    if not runs_triton(torch.zeros(1)):
        pytest.skip("needs the interpreter")

    with simulated_chains(monkeypatch, 1):
        monkeypatch.setattr(network_parts, "GraphedPeer", lambda function, example: function)
        monkeypatch.setattr(network_parts, "TRUNK_KIND", "as_is")
        torch.manual_seed(0)
        heads, example = plain_heads(), torch.randn(1, 3, 8, 8)
        del heads["block1"]  # what is interpreted takes its time
        network = EarlyExitNetwork(SmallNet(), heads, example_input=example).eval()
        yield subject_of("tests:small", network, example)


def test_the_parts_are_captured_and_answer_rightly(subject, monkeypatch):
    launched = []
    exit_launch = network_parts.ExitLaunch

    def spy(buffers, place, heads):
        launched.append((place, len(heads)))
        return exit_launch(buffers, place, heads)

    monkeypatch.setattr(network_parts, "ExitLaunch", spy)
    answers = []

    def wrong(self, which, runner):
        answers.append((which, runner(self.subject.example)))

    monkeypatch.setattr(NetworkParts, "wrong", wrong)  # itself another test's
    with ExitStack() as opened, subject.exits(NEVER):
        parts = NetworkParts(subject, opened)
        parts.forks = ("block0",)
        calls = {name: parts.capture(name) for name in (BARE, HEADS, BOTH)}
        assert launched == [(0, 1), (1, 1)], "one without the classifier"
        for call in calls.values():
            call()
    (of_bare, bare), (of_both, both) = answers
    assert of_bare == () and of_both == ("block0", "block2")
    assert bare.label.equal(both.label) and bare.exit_index.tolist() == both.exit_index.tolist() == [2]


def test_launches_leave_the_trunk_where_they_do_by_rule(subject, monkeypatch):
    made = []

    class Runner:
        def __init__(self, network, example, *, batch_sizes, trunk, forks):
            made.append((batch_sizes, trunk.notes, forks))

        def __call__(self, x):
            raise AssertionError("not called here")

        def close(self):
            made.append("closed")

    monkeypatch.setattr(NetworkParts, "wrong", lambda self, which, runner: None)
    with ExitStack() as opened:
        parts = NetworkParts(subject, opened)
        parts.forks = ("block2",)
        parts.both(Runner)
        parts.both(Runner)
    assert made == [*[((1,), parts.trunk.notes, ("block2",))] * 2, "closed", "closed"]


def test_forks_by_rule_are_those_of_all_captures_and_of_records(subject):
    with ExitStack() as opened:
        parts = NetworkParts(subject, opened)
        protocol = parts.protocol
    assert protocol["forks"] == [*parts.forks] != [] and set(parts.forks) <= set(subject.network.taps)
    assert protocol["trunk_kind"] == "as_is"


def test_other_answers_than_the_eager_networks_are_wrong(subject, monkeypatch):
    call = OverlappedRunner.__call__

    def other(self, x):
        said = call(self, x)
        return said._replace(label=(said.label + 1) % 5)

    monkeypatch.setattr(OverlappedRunner, "__call__", other)
    with ExitStack() as opened, pytest.raises(WrongAnswer, match="^both: answers differ .*; not timed$"):
        NetworkParts(subject, opened).both()


@pytest.mark.parametrize("part", [BARE, HEADS, BOTH])
def test_nothing_that_answers_wrongly_is_timed(subject, monkeypatch, part):
    wrong = {
        BARE: (NetworkParts, lambda self, which, runner: None if which else "off"),
        BOTH: (NetworkParts, lambda self, which, runner: "off" if which else None),
        HEADS: (alone_head.AloneHead, lambda self, said, peer: "off"),
    }
    owner, says = wrong[part]
    monkeypatch.setattr(NetworkParts, "forks", ("block2",))
    monkeypatch.setattr(owner, "wrong_answer" if part == HEADS else "wrong", says)
    with ExitStack() as opened, pytest.raises(WrongAnswer, match=f"^{part}: off; not timed$"):
        NetworkParts(subject, opened).capture(part)


def test_a_measurement_from_end_to_end(subject, monkeypatch):
    us = {BARE: 10.0, HEADS: 80.0, BOTH: 12.0}
    profiling, asked, begun = [], [], []

    @contextmanager
    def profiler(activities):
        profiling.append(True)
        yield
        profiling.pop()

    def time_rounds(variants, device, *, rounds, repeat):
        asked.append((list(variants), [len(calls) for calls in variants.values()], bool(profiling), repeat))
        return {name: [[us[name]] * rounds for _ in captures] for name, captures in variants.items()}

    def both():
        """Two launches that record, if asked, where their programs run; in each replay on the next SM."""
        turns = [new_turns(1, 1, 4, torch.device("cpu")) for _ in range(2)] if is_recording() else []
        replays = itertools.count()

        def call():
            number = next(replays)
            for one, start, end in zip(turns, (2.5, 10.0), (4.5, 11.0), strict=False):
                one[0] = torch.tensor([number, 10**18 + int(1000 * start), 10**18 + int(1000 * end)])

        return call

    def record_trace(call, x, requests, trace_file):
        assert trace_file.parent.is_dir()
        for _ in range(requests):
            call(x)
        kernels = [("conv", 0.0, 7, 9.0), ("exit_kernel", 2.0, 8, 3.0), ("exit_kernel", 10.0, 7, 1.0)]
        events = [event for number in range(requests) for event in replay(number, 100.0 * number, *kernels)]
        return trace_of(*events[: len(events) - lost])

    lost = 0
    for name, value in (("time_rounds", time_rounds), ("record_trace", record_trace), ("torch_profile", profiler)):
        monkeypatch.setattr(measurement, name, value)
    monkeypatch.setattr(timers, "time_rounds", time_rounds)
    monkeypatch.setattr(measurement, "CAPTURES", 1)
    monkeypatch.setattr(measurement, "fastest_convolutions", lambda samples: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(multi_processor_count=132))
    captured = {name: lambda name=name: lambda: None for name in us}  # that they can be is another test's
    captured[BOTH] = both
    monkeypatch.setattr(NetworkParts, "__init__", lambda self, subject, opened: None)
    monkeypatch.setattr(NetworkParts, "capture", lambda self, part: captured[part]())
    monkeypatch.setattr(NetworkParts, "forks", ("block0",))
    monkeypatch.setattr(NetworkParts, "trunk", SimpleNamespace(notes=("as it is",)), raising=False)
    found = measurement.measure_overlap(subject, lambda what, share: begun.append((what, share)))
    assert asked == [
        ([BARE], [1], False, 2),
        ([BARE, HEADS, BOTH], [1, 1, 1], False, 50),
        ([BARE, BOTH], [1, 1], True, 50),
    ]
    assert found.times == {BARE: [[10.0] * 20], HEADS: [[4.0] * 20], BOTH: [[12.0] * 20]}, "of one launch of each head"
    assert found.profiled == {BARE: [10.0] * 20, BOTH: [12.0] * 20} and found.repeat == 50
    assert {name: len(replays) for name, replays in found.replays.items()} == {BARE: 20, BOTH: 20}
    assert [one.programs for one in found.recorded] == [[(0, sm, 2.5, 4.5), (1, sm, 10.0, 11.0)] for sm in range(20)], (
        "each replay's own"
    )
    assert found.forks == ("block0",)
    parts = [f"captures of {name}" for name in (BARE, HEADS, BOTH)]
    assert [what for what, _ in begun] == ["trunk", *parts, "timing", "profiling"]
    assert [share for _, share in begun] == sorted({share for _, share in begun}) and begun[-1][1] < 1.0
    lost = 4  # a whole replay and its launch
    with pytest.raises(RuntimeError, match="trunk: the profiler's trace holds 19 of 20 replays"):
        measurement.measure_overlap(subject, lambda what, share: None)
