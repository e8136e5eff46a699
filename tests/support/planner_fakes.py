"""Fakes for the planner: eager runners under other names, and times that a test chooses."""

from contextlib import nullcontext

import torch
from auxhead.model import EagerRunner, EarlyExitNetwork
from auxhead.model.auto import auto_runner, planner
from auxhead.model.auto.candidates import Candidate
from auxhead.model.auto.plan import PassTimes
from auxhead.model.runners import checks
from support.example_models import SmallNet, plain_heads
from torch import Tensor

#: Candidates of a :class:`SmallNet` whose last head is followed by too little, in their order.
NAMES = ("serial", "overlapped (1 fork)", "overlapped (2 forks)", "polled", "gated")
#: Name of the graph that ``exits="overlapped"`` captures of it.
PLAIN = "overlapped (1 fork)"


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 8, 8) * torch.rand(samples, 1, 1, 1) * 4


def small_network(seed: int = 0, threshold: float = 0.6) -> EarlyExitNetwork:
    """The same one for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return EarlyExitNetwork(SmallNet(), plain_heads(), threshold, example_input=images(2)).eval()


class Runner(EagerRunner):
    """The eager runner as a candidate."""

    trunk = "the shared trunk"
    closed = False

    def __init__(self, network, candidate, sizes, trunk, gpu):
        super().__init__(network)
        self.candidate, self.sizes, self.gpu = candidate, sizes, gpu
        self.forks = {size: candidate.forks for size in sizes}
        gpu.made.append((candidate.name, trunk))
        gpu.open += 1

    def __call__(self, x):
        result = super().__call__(x)
        return result._replace(label=(result.label + 1) % 5) if self.candidate.name in self.gpu.wrong else result

    def describe(self):
        return f"Batch {self.sizes[-1]}: {self.candidate.name}."

    def close(self):
        assert not self.closed
        self.closed = True
        self.gpu.open -= 1


class FakeGpu:
    """Settings of the fakes, and a log of what was done with them."""

    def __init__(self, monkeypatch):
        self.us = dict.fromkeys((*NAMES, "polled (compact)"), 100.0)
        """By name, the host time of a request; on the device it takes half as long."""
        self.fails = {}
        """By name, the error of making it."""
        self.wrong = set()
        """Names of those that answer otherwise."""
        self.made = []
        """Name and trunk of every runner, in order."""
        self.open = 0
        self.measured = 0

        def make(candidate, network, _example, size, smaller, trunk):
            if candidate.name in self.fails:
                raise self.fails[candidate.name]
            return Runner(network, candidate, (*smaller, size) if candidate.compact else (size,), trunk, self)

        def plain(network, _example, *, batch_sizes, trunk):
            return make(Candidate("overlapped", network.taps[1:2]), network, _example, *batch_sizes, (), trunk)

        def measure(runners, batches):
            assert not any(runner.closed for runner in runners.values())
            self.measured += 1
            wobble = [1.0 + 0.001 * (index % 3) for index in range(12)]
            return {
                name: PassTimes(
                    [self.us[name] * part for part in wobble], [self.us[name] / 2 * part for part in wobble]
                )
                for name in runners
            }

        monkeypatch.setattr(Candidate, "make", make)
        monkeypatch.setattr(planner, "OverlappedRunner", plain)
        monkeypatch.setattr(planner, "measure", measure)
        monkeypatch.setattr(checks, "_check_cuda", lambda _x: None)
        monkeypatch.setattr(auto_runner, "beside_captures", nullcontext)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
