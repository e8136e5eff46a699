"""Fakes for footprints: a network that never runs, whose heads cost more the more room they take."""

from auxhead.autotune.measuring.cells import resnet_cell
from auxhead.autotune.measuring.failures import Failure
from auxhead.autotune.measuring.heads_in_situ import SideLaunches
from auxhead.autotune.overlap.footprints import (
    RECORDED,
    FootprintOccupancy,
    FootprintsMeasured,
    TimedPart,
    footprints_to_measure,
)
from auxhead.autotune.overlap.occupancy import MeasuredResidency, ProfilerEstimate, TheoreticalOccupancy
from auxhead.autotune.overlap.records import footprint_records
from auxhead.kernels.launch.head_shape import HeadShape
from support.pretended_gpu import ENVIRONMENT

CELL = resnet_cell("resnet18", "float16", 1, 10, "stages")
FORKS = ("layer1", "layer3")
TRUNK_US = 160.0


def shapes(batch=1, classes=10):
    """Of ResNet-18's heads after its stages."""
    sizes = ((64, 56), (128, 28), (256, 14), (512, 7))
    return {
        f"layer{stage}": HeadShape(batch, channels, 1, side * side, 1, 1, "channels_last", "avg", classes, "float16")
        for stage, (channels, side) in enumerate(sizes, start=1)
    }


def measured(batch=1, fails=None, added=lambda share: 0.5 + 4000.0 * share):
    """Times of two captures and three rounds, from ``added``: microseconds by the share of warps.

    ``fails`` names a footprint that does not run.
    """
    by_tap = shapes(batch)
    points = footprints_to_measure(list(by_tap.values()), SideLaunches(FORKS))
    failed = {point: Failure("OutOfResources", "registers") for point in points if point.name == fails}
    times = {TimedPart("trunk"): _times(TRUNK_US)}
    occupied = {}
    for point in (point for point in points if point not in failed):
        programs = sum(config.programs(shape.view, 10).total for shape, config in point.configs)
        warps = sum(config.num_warps for _, config in point.configs) / len(point.configs)
        share = programs * warps * 2.0 / (132 * 64 * TRUNK_US)
        cost = added(share) * (1.0 if point.point.trunk_first else 3.0)
        times[TimedPart("both", point)] = _times(TRUNK_US + cost)
        times[TimedPart("heads", point)] = _times(12.0)
        theoretical = [TheoreticalOccupancy(96, 0, 2048, int(warps), 5, 0.3125)] * 2
        residency = [MeasuredResidency(share * part, 20 * share * part, 40, 30.0) for part in (0.9, 1.0, 1.1)]
        occupied[point] = FootprintOccupancy(
            theoretical, [ProfilerEstimate(0.0, True), ProfilerEstimate(3.0, False)], residency, programs
        )
    times[TimedPart(RECORDED, points[0])] = _times(TRUNK_US * 1.02)
    return FootprintsMeasured(by_tap, points, times, occupied, failed, 6, {"trunk": "feed", "forks": [*FORKS]})


def _times(us):
    return [[us, us, us], [us * 1.001, us * 1.001, us * 1.001]]


def records(batch=1, **changes):
    """What is kept of it."""
    return footprint_records(
        resnet_cell("resnet18", "float16", batch, 10, "stages"), measured(batch, **changes), ENVIRONMENT
    )
