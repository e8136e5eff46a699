"""Measuring footprints without a GPU: captures, checks, timing and recording are simulated."""

import importlib
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from auxhead.autotune.measuring.captured import CHAIN
from auxhead.autotune.measuring.heads_in_situ import SideLaunches
from auxhead.autotune.overlap.footprints import BY_RULE
from auxhead.autotune.overlap.measure import BARE, BOTH, HEADS, NetworkParts
from auxhead.autotune.overlap.occupancy import MeasuredResidency, ProfilerEstimate, TheoreticalOccupancy
from auxhead.autotune.overlap.records import footprint_records
from auxhead.autotune.records.comparison import typical
from auxhead.kernels.launch.residency import is_recording, new_turns
from support.footprint_fakes import CELL, FORKS, shapes
from support.pretended_gpu import ENVIRONMENT

timing = importlib.import_module("auxhead.autotune.overlap.footprints")
parts = importlib.import_module("auxhead.autotune.overlap.measure")
timers = importlib.import_module("auxhead.autotune.measuring.timers")

#: Microseconds of a replay.
US = {BARE: 160.0, BOTH: 170.0, HEADS: 400.0, timing.RECORDED: 171.0}


class Runner(NamedTuple):
    point: SideLaunches
    recorded: bool

    def __call__(self, x):
        raise AssertionError("nothing is replayed here")

    def close(self):
        pass


class Parts:
    """A network that is launched nowhere; a runner has two launches beside the trunk, and one that waits for it."""

    forks = FORKS
    heads = [SimpleNamespace(shape=shape) for shape in shapes().values()]
    by_rule = SideLaunches(FORKS)
    protocol = {"trunk": "feed", "forks": [*FORKS]}
    checked = NetworkParts.checked
    wrong_without_priority = False
    launched: list = []

    def __init__(self, subject, opened):
        self.subject, self._network, self._opened = subject, subject.network, opened

    def capture(self, part):
        return lambda: None

    def launching(self, configs):
        return nullcontext()

    def launch(self, configs, point, which):
        self.launched.append((which, is_recording()))
        return [SimpleNamespace(compiled="kernel")] * 2

    def runner(self, configs, point):
        for programs in (3, 5, 100):
            new_turns(programs, programs, 4, torch.device("cpu"))
        return Runner(point, is_recording())

    def wrong(self, which, runner):
        return "off" if self.wrong_without_priority and not runner.point.trunk_first else None


@pytest.fixture
def measure(monkeypatch):
    subject = SimpleNamespace(
        example=torch.zeros(1, 3, 8, 8),
        exits=lambda pattern: nullcontext(),
        network=SimpleNamespace(taps=tuple(shapes())),
    )
    asked = SimpleNamespace(timed=[], resident=[])

    def time_rounds(variants, device, *, rounds, repeat):
        asked.timed.append((len(variants), repeat))
        us = {key: US[key if isinstance(key, str) else key.part] for key in variants}
        return {key: [[us[key]] * rounds for _ in calls] for key, calls in variants.items()}

    def first_launches(points, launch, device):
        for point in points:
            launch(point)
        return {}

    def residency(replay, device, launches, trunk_us):
        asked.resident.append((replay.func.recorded, [launch.programs for launch in launches], trunk_us))
        return [MeasuredResidency(0.01, 0.02, 30, 12.0)] * timing.REPLAYS

    simulated = {
        "NetworkParts": Parts,
        "first_launches": first_launches,
        "fastest_convolutions": lambda samples: nullcontext(),
        "theoretical_occupancy": lambda compiled, device: TheoreticalOccupancy(96, 0, 0, 4, 5, 0.3125),
        "_residency": residency,
        "_estimated": lambda replays, example: [[ProfilerEstimate(1.0, False)] * 3 for _ in replays],
    }
    for name, value in simulated.items():
        monkeypatch.setattr(timing, name, value)
    for module in (timers, parts):
        monkeypatch.setattr(module, "time_rounds", time_rounds)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(Parts, "launched", [])
    return SimpleNamespace(run=lambda: timing.measure_footprints(subject, lambda what, share: None), asked=asked)


def test_a_measurement_from_end_to_end(measure):
    found = measure.run()
    count = len(found.footprints)
    assert not found.failed and found.footprints[0].name == BY_RULE and found.shapes == shapes()
    # the trunk, every footprint whole and its heads alone, and the first one also recorded
    assert measure.asked.timed == [(1, 2), (1 + 2 * count + 1, 3)]
    by_rule = found.footprints[0]
    assert typical(found.times[timing.TimedPart(HEADS, by_rule)]) == pytest.approx(US[HEADS] / CHAIN)
    assert typical(found.times[timing.TimedPart(BOTH, by_rule)]) == pytest.approx(US[BOTH])
    # the launch that waits for the trunk is not beside it
    assert measure.asked.resident == [(True, [3, 5], pytest.approx(160.0))] * count
    assert found.occupied[by_rule].programs == 8 and len(found.occupied[by_rule].estimate) == 2
    taps = tuple(shapes())
    compiled, asked = Parts.launched[: 2 * count], Parts.launched[2 * count :]
    assert compiled == [(taps, False), (taps, True)] * count, "with recording, and without"
    assert asked == [(taps[:3], False)] * count, "of launches as they are timed, those up to the last fork"
    records = footprint_records(CELL, found, ENVIRONMENT)
    assert len(records) == count and records[0].protocol["forks"] == list(FORKS) and records[0].protocol["repeat"] == 3


def test_a_footprint_that_answers_wrongly_is_told_of_and_not_timed(measure, monkeypatch):
    monkeypatch.setattr(Parts, "wrong_without_priority", True)
    found = measure.run()
    assert {point.name for point in found.failed} == {"same priority", "programs x8, same priority"}
    assert all("off; not timed" in str(failure) for failure in found.failed.values())
    assert not {variant.footprint for variant in found.times} & found.failed.keys()
    errors = [record.error for record in footprint_records(CELL, found, ENVIRONMENT) if record.error]
    assert len(errors) == 2 and all(error.startswith("WrongAnswer: ") for error in errors)


def test_what_is_by_rule_must_not_fail(measure, monkeypatch):
    monkeypatch.setattr(Parts, "wrong", lambda self, which, runner: "off")
    with pytest.raises(RuntimeError, match="by rule: WrongAnswer: by rule: off; not timed"):
        measure.run()
    assert not measure.asked.timed


def test_nothing_beside_the_trunk(measure, monkeypatch):
    monkeypatch.setattr(Parts, "forks", ())
    with pytest.raises(ValueError, match="forks: got none by rule"):
        measure.run()
