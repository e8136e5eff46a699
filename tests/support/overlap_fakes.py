"""Fakes for overlap: traces of a network that never ran, and measurements made of them."""

import torch
from auxhead.autotune.measuring.cells import resnet_cell
from auxhead.autotune.overlap.measure import OverlapMeasured
from auxhead.autotune.overlap.replays import read_replays, recorded_replay
from auxhead.autotune.overlap.run import overlap_records
from auxhead.kernels.launch.residency import Residency
from support.example_traces import replay, trace_of
from support.pretended_gpu import ENVIRONMENT

CONV, HEADS = "sm90_xmma_fprop_implicit_gemm", "exit_kernel"
CELL = resnet_cell("resnet18", "float16", 8, 10, "blocks")
#: Two launches of heads beside the trunk; the rest with the classifier.
FORKS = ("layer1.1", "layer3.0")


def trace(last_heads=13.0, slower=0.0):
    """Three replays, the second and third slower than the first by ``slower`` and twice that; without heads, too."""
    return trace_of(
        *(
            event
            for place in range(3)
            for event in replay(
                3 - place,
                1000.0 * (3 - place),
                ("max_pool_kernel", 0.0, 7, 8.0),
                (CONV, 9.0, 7, 20.0),
                (HEADS, 10.0, 13, 12.0),
                (CONV, 30.0, 7, 16.0 + slower * place),
                *([(HEADS, 35.0, 13, last_heads), (HEADS, 50.0 + slower * place, 7, 4.0)] if last_heads else []),
            )
        )
    )


def bare_trace():
    """Three replays of the trunk alone, which takes its time for the classifier."""
    names = (("max_pool_kernel", 0.0, 7, 8.0), (CONV, 9.0, 7, 18.0), (CONV, 28.0, 7, 16.0), ("fused", 45.0, 7, 3.0))
    return trace_of(*(event for place in range(3) for event in replay(place, 100.0 * (place + 1), *names)))


def residency(*turns, begin=0):
    """What programs recorded, (SM, start, end) in microseconds, on a clock that shows ``begin`` nanoseconds at 0."""
    rows = [(sm, begin + round(1e3 * start), begin + round(1e3 * end)) for sm, start, end in turns]
    return Residency(torch.tensor(rows), programs=len(rows), num_warps=4)


def recorded(replays):
    """As if each launch of heads had two programs, the second half a microsecond late."""
    return [
        recorded_replay(
            replay,
            [
                residency((0, one.start_us, one.end_us), (131, one.start_us + 0.5, one.end_us), begin=10**18)
                for one in replay
                if one.role != "trunk"
            ],
            sm_count=132,
        )
        for replay in replays
    ]


def measured(forks=FORKS, heads=20.0, both=104.0, **of_trace):
    """A trunk of 100 us, in five captures a quarter apart and three rounds."""
    replays = {"trunk": read_replays(bare_trace()), "both": read_replays(trace(**of_trace))}
    times = {"trunk": 100.0, "heads": heads, "both": both}
    return OverlapMeasured(
        times={name: [[us + place / 4] * 3 for place in range(5)] for name, us in times.items()},
        profiled={"trunk": [110.0] * 3, "both": [both * 1.25] * 3},
        replays=replays,
        recorded=recorded(replays["both"]),
        forks=forks,
        repeat=10,
        notes=("Convolutions that run with their ReLU as one launch of cuDNN: 17.",),
    )


def records(cell=CELL, **changes):
    """The two records of one network."""
    return overlap_records(cell, measured(**changes), ENVIRONMENT)
