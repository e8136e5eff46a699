"""Timings made up by chance: captures that differ, rounds that drift, and a heavy tail; and some without noise."""

import numpy as np
from auxhead.autotune.records.comparison import Paired

CAPTURES, ROUNDS = 5, 20


def noisy(generator, us, *, pairs=None, variants=1, captures=CAPTURES, rounds=ROUNDS):
    """[pairs, variants, captures, rounds] of one truth: captures 1 % apart, rounds with a drift and a heavy tail."""
    count = pairs or 1
    shape = (count, variants, captures, rounds)
    log = np.log(us) + 0.01 * generator.standard_normal((*shape[:3], 1))  # of each capture
    log = log + 0.003 * generator.standard_normal((count, 1, 1, rounds)).cumsum(axis=-1)  # the clock, common to all
    log = log + 0.004 * generator.standard_normal(shape)
    log = log + (generator.random(shape) < 0.05) * generator.exponential(0.2, shape)  # a busy host now and then
    return np.exp(log)


def constant(us, run="run", baseline=100.0):
    return Paired([[us] * 4] * 3, [[baseline] * 4] * 3, run)
