"""Fakes for sweeps: a measurer with made-up times, of known truth and realistic noise."""

import hashlib
import math

import numpy as np
from auxhead.autotune.measuring.failures import Failure
from auxhead.autotune.measuring.heads_alone import Target
from auxhead.autotune.records.comparison import Paired
from auxhead.autotune.sweep.config_text import text
from auxhead.autotune.sweep.measure import Sweep
from auxhead.autotune.sweep.records import SweepRecords
from auxhead.autotune.sweep.search import Ask
from auxhead.autotune.sweep.space import spread_out
from auxhead.autotune.sweep.winners import HeadWinner
from auxhead.kernels.launch.head_shape import HeadShape
from support.pretended_gpu import ENVIRONMENT

PROTOCOL = {"kernel": "0123456789abcdef", "place": "alone"}


def small_target(samples=8, channels=64, columns=49, classes=10, taps=("layer1",), model="resnet18"):
    shape = HeadShape(samples, channels, 1, columns, 1, 1, "channels_last", "avg", classes, "float16")
    return Target(shape, model, taps)


def records_at(out, **changes):
    parts = ((ENVIRONMENT, "environment"), (PROTOCOL, "protocol"))
    return SweepRecords(out, *({**usual, **changes.get(name, {})} for usual, name in parts))


def true_us(target, config):
    """Microseconds that fall and rise smoothly along every field, to a best point that depends on the shape."""
    digest = hashlib.sha256(str(target.shape).encode()).digest()
    us = 3.0
    for byte, (name, weight) in zip(digest, WEIGHTS.items(), strict=False):
        wanted = 2 + byte % 6
        us += weight * abs(getattr(config, name).bit_length() - wanted)
    return us


WEIGHTS = {"block_c": 0.5, "block_a": 0.4, "window_parts": 0.3, "block_k": 0.2, "num_warps": 0.4, "stages": 0.1}


class Synthetic:
    """Measures what ``true_us`` says, with an offset of each capture, drift of all and outliers; counts what it did."""

    def __init__(self, seed=0, noise=1.0, fails=lambda config: None):
        self._generator = np.random.default_rng(seed)
        self._noise = noise
        self._fails = fails
        self.prepared, self.timed = [], []
        self._runs = 0

    def prepare(self, target, configs):
        self.prepared += map(text, configs)
        return self._failures("prepare", configs)

    def _failures(self, step, configs):
        found = {config: self._fails(config) for config in configs}
        return {config: Failure(*failed[1:]) for config, failed in found.items() if failed and failed[0] == step}

    def time(self, target, configs, rounds, captures):
        assert configs[0] == target.rule, "the baseline"
        assert set(self.prepared) >= set(map(text, configs)), "prepared before"
        self._runs += 1
        self.timed += [(text(config), rounds) for config in configs]
        draw, noise = self._generator, self._noise
        drift = 0.003 * noise * draw.standard_normal(rounds).cumsum()
        times = {}
        for config in configs:
            shape = (captures, rounds)
            log = math.log(true_us(target, config)) + 0.01 * noise * draw.standard_normal((captures, 1)) + drift
            log = log + 0.004 * noise * draw.standard_normal(shape)
            times[config] = np.exp(log + (draw.random(shape) < 0.05 * noise) * draw.exponential(0.2, shape)).tolist()
        baseline = times[target.rule]
        failures = self._failures("time", configs)
        return {
            config: failures.get(config) or Paired(own, baseline, f"run {self._runs} of {id(self)}")
            for config, own in times.items()
        }


def asking(*configs, rounds=4, captures=5):
    """A strategy that asks for some configurations and the rule's."""

    def search(target):
        yield Ask((target.rule, *configs), rounds, 1.0, captures)

    return search


def in_two_steps(target):
    """A strategy that asks for three configurations, then for two of them in more captures, beside the rule's."""
    configs = (target.rule, *spread_out(target.shape, 3))
    yield Ask(configs, 4, 0.5)
    yield Ask(configs[:3], 4, 1.0, captures=6)


def winners(sweep):
    """The winners of each target."""
    return [HeadWinner.of(one.target.shape, one.decision) for one in sweep.tunings]


def run(search, kept, measurer=None, targets=None):
    """Run a strategy on the targets, by default a small one; return the winners, the measurer and the sweep."""
    measurer = measurer or Synthetic()
    sweep = Sweep(measurer, search, kept)
    sweep.run(targets or (small_target(),))
    return winners(sweep), measurer, sweep


def fails_at(step, *configs):
    def fails(config):
        return (step, "out of resources", f"shared memory at {step}: 3 > 2") if config in configs else None

    return fails
