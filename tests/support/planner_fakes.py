"""Fakes for the planner: eager runners under other names, and times and a clock that a test chooses."""

import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from auxhead.model import AutoRunner, EagerRunner, EarlyExitNetwork, make_runner
from auxhead.model.auto import auto_runner, candidates, pass_times, planner
from auxhead.model.auto.candidates import Candidate
from auxhead.model.auto.pass_times import PassTimes
from auxhead.model.runners import checks
from support.example_models import SmallNet, plain_heads
from support.spread_exits import images

#: Candidates of a :class:`SmallNet` whose last head is followed by too little, in their order.
NAMES = ("serial", "overlapped (1 fork)", "overlapped (2 forks)", "polled", "gated")
#: The order in which they are made.
AS_MADE = ("overlapped (1 fork)", "polled", "gated", "serial", "overlapped (2 forks)")
#: Name of the graph that ``exits="overlapped"`` captures of it.
PLAIN = "overlapped (1 fork)"


def small_network(seed: int = 0, threshold: float = 0.6) -> EarlyExitNetwork:
    """The same one for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return EarlyExitNetwork(SmallNet(), plain_heads(), threshold, example_input=images(2)).eval()


class Runner(EagerRunner):
    """The eager runner as a candidate."""

    closed = False
    trunk = None

    def __init__(self, network, candidate, sizes, trunk, gpu):
        super().__init__(network)
        self.candidate, self.sizes, self.trunk, self.gpu = candidate, sizes, trunk, gpu
        self.forks = {size: candidate.forks for size in sizes}
        self.asked = 0
        gpu.made.append((candidate.name, trunk.kind))
        usual_s = gpu.first_s if len(gpu.made) == 1 and gpu.first_s else gpu.making_s
        gpu.seconds += gpu.making_s_of.get(candidate.runner, usual_s)
        gpu.open += 1

    def __call__(self, x):
        assert not self.closed
        self.asked += 1
        self.gpu.seconds += self.gpu.request_s
        if self.gpu.counter is not None:
            self.gpu.counter.joules += self.gpu.joules.get(self.candidate.name, 0.0)
        result = super().__call__(x)
        return result._replace(label=(result.label + 1) % 5) if self.candidate.name in self.gpu.wrong else result

    def describe(self):
        return f"Batch {self.sizes[-1]}: {self.candidate.name}."

    def close(self):
        assert not self.closed
        self.closed = True
        self.gpu.open -= 1


@dataclass(frozen=True)
class FakeTrunk:
    module: object
    made_as: str
    notes: tuple
    branches: bool
    side_by_side: bool = False

    @property
    def kind(self):
        return "branched" if self.side_by_side else self.made_as


class FakeGpu:
    """Settings of the fakes, and a log of what was done with them."""

    def __init__(self, monkeypatch):
        self.us = dict.fromkeys((*NAMES, "polled (compact)"), 100.0)
        """By name, the host time of a request."""
        self.on_device = lambda us: us / 2
        """Returns the time on the device, of that of the host."""
        self.branches = False
        """True if the trunk "cudnn" has branches."""
        self.times_as_long = {}
        """By kind of trunk, what it makes of those times, 1 if it is not there."""
        self.fails = {}
        """By name or kind of trunk, the error of making it."""
        self.wrong = set()
        """Names of those that answer otherwise."""
        self.made = []
        """Name and trunk of every runner, in order."""
        self.trunks = Counter()
        """How often each kind of trunk was made."""
        self.open = 0
        self.measured = 0
        """Batch sizes; their trunks are measured beside."""
        self.seconds = 0.0
        """Time, which passes only where these say so: in making a runner (the first), a trunk, in a request."""
        self.making_s = self.first_s = self.trunk_s = self.request_s = 0.0
        self.counter = None
        """That of energy, which requests move by these joules, by name."""
        self.joules = {}
        self.making_s_of = {}
        """Time by runner or kind of trunk, where it takes another than ``making_s`` or ``trunk_s``."""

        def make(candidate, network, _example, size, smaller, trunk, _done=()):
            assert candidate.trunk == trunk.kind
            if set(candidate.forks) - set(network.taps):
                raise ValueError("forks: wants taps of the network")
            if candidate.name in self.fails:
                raise self.fails[candidate.name]
            return Runner(network, candidate, (*smaller, size) if candidate.compact else (size,), trunk, self)

        def plain(network, _example, *, batch_sizes, trunk):
            candidate = Candidate("overlapped", network.taps[1:2], trunk=trunk.kind)
            return make(candidate, network, _example, *batch_sizes, (), trunk)

        def begin_trunk(backbone, _taps, _example, kind, _reading, _hand_over):
            self.trunks[kind] += 1
            self.seconds += self.making_s_of.get(kind, self.trunk_s)
            refused = kind in self.fails
            notes = (f"Not {kind}: {self.fails[kind]}",) if refused else ()
            made = FakeTrunk(backbone if refused else object(), kind, notes, self.branches and kind == "cudnn")
            return lambda: made

        def measure(runners, batches, until):
            assert not any(runner.closed for runner in runners.values())
            of_one_trunk = {runner.candidate.trunk for runner in runners.values()}
            self.measured += len(runners) > len(of_one_trunk) or len(runners) == 1
            wobble = [1.0 + 0.001 * (index % 3) for index in range(12)]
            times = {}
            for name, runner in runners.items():
                us = self.us[runner.candidate.runner] * self.times_as_long.get(runner.candidate.trunk, 1.0)
                host = [us * part for part in wobble]
                times[name] = PassTimes(host, [self.on_device(one) for one in host])
            return times

        monkeypatch.setattr(Candidate, "make", make)
        monkeypatch.setattr(planner, "OverlappedRunner", plain)
        monkeypatch.setattr(planner, "measure", measure)
        monkeypatch.setattr(candidates, "begin_trunk", begin_trunk)
        for module in (pass_times, planner, candidates):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        monkeypatch.setattr(sys.modules["auxhead.model.make_runner"], "is_on_cuda", lambda _x: True)
        monkeypatch.setattr(checks, "_check_cuda", lambda _x: None)
        monkeypatch.setattr(auto_runner, "beside_captures", nullcontext)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def first_call(samples: int = 4, **options: object) -> AutoRunner:
    """Make a runner within ten seconds, unless options say otherwise, and remember nothing."""
    torch.manual_seed(2)  # of which a batch of four leaves early
    runner = make_runner(small_network(), images(samples), **{"budget": "quick", "plan": None, **options})
    assert isinstance(runner, AutoRunner)
    return runner
