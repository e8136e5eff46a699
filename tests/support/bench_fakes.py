"""Fakes for the benchmark: a small network, clock, graphs and runners without a GPU."""

import importlib
from types import SimpleNamespace

import torch
from auxhead.autotune.bench.measure import BenchOptions, run_cell
from auxhead.autotune.bench.run import unsettled
from auxhead.autotune.bench.variants import BuiltVariant
from auxhead.autotune.measuring.subject import subject_of
from auxhead.autotune.measuring.timers import Samples
from auxhead.autotune.records.record import read_records
from auxhead.model import EagerRunner, EarlyExitNetwork
from support.example_models import SmallNet, plain_heads
from support.pretended_gpu import ENVIRONMENT

bench = importlib.import_module("auxhead.autotune.bench.measure")

variants = importlib.import_module("auxhead.autotune.bench.variants")

#: Variants that run on the CPU.
WANTED = ("eager*", "graph-*@as_is", "overlapped@as_is")


def small_subject():
    """A small network in a cell of its own, on the CPU."""
    torch.manual_seed(0)
    network = EarlyExitNetwork(SmallNet(), plain_heads(), example_input=torch.randn(2, 3, 16, 16)).eval()
    return subject_of("tests:small", network, torch.randn(4, 3, 16, 16))


class Runner(EagerRunner):
    """The eager runner under another one's name; counts how many are open."""

    open = 0
    shift = 0

    def __init__(self, network):
        super().__init__(network)
        Runner.open += 1

    def __call__(self, x):
        result = super().__call__(x)
        return result._replace(label=(result.label + Runner.shift) % 5)

    def close(self):
        Runner.open -= 1


class AutoRunner(Runner):
    """Remembers the rules that were in force when each was made."""

    rules = []

    def __init__(self, network, samples, *, batch_sizes, trunk, budget):
        assert batch_sizes == (4,) and trunk == "as_is" and budget == "thorough" and len(samples) == 16  # all inputs
        super().__init__(network)
        AutoRunner.rules.append(tuple(head.rule.threshold for head in network.heads))
        said = f"polled, {len(AutoRunner.rules)} us to the answer."
        self.plans = {4: SimpleNamespace(describe=lambda: said)}


def make_runner(network, example_input, *, exits, batch_sizes, trunk, compact=False):
    assert batch_sizes == ((1, 2, 3, 4) if compact else (4,)) and trunk == "as_is"
    assert len(example_input) == 4
    return Runner(network)


def faked_plan(out, monkeypatch):
    """BenchOptions records in ``out``.

    Graphs are called eagerly, and a variant takes as many microseconds as its name has letters.
    """

    def time_captures(calls, inputs, *, rounds, warm_up, repeat, requests=1):
        return {
            name: Samples(
                device=[[float(len(name))] * rounds for _ in captures],
                host=(host := [[2.0 * len(name) + place] * rounds * requests for place, _ in enumerate(captures)]),
                call=host,
            )
            for name, captures in calls.items()
        }

    monkeypatch.setattr(bench, "time_captures", time_captures)
    monkeypatch.setattr(variants, "_in_graph", lambda function, trunk, context: BuiltVariant(function))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Runner, "open", 0)
    monkeypatch.setattr(Runner, "shift", 0)
    monkeypatch.setattr(AutoRunner, "rules", [])
    monkeypatch.setattr(variants, "AutoRunner", AutoRunner)
    monkeypatch.setattr(variants, "make_runner", make_runner)
    return BenchOptions(out, ENVIRONMENT, 5, WANTED, exits=("never", "block1", "own"))


def run(subject, plan):
    for _, runs in unsettled([subject.cell], plan):
        run_cell(subject, runs, plan)
    return read_records(plan.out) if plan.out.exists() else []
