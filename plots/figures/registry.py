"""The list of all figures, with the records that each is drawn from and the command that measures them."""

from ..figure_kind import Drawing, FigureKind
from ..timelines import KINDS


def _drawing(name: str) -> Drawing:
    from ..sweep_heads import read_swept
    from . import (
        calibration,
        doctor,
        exits,
        footprint,
        gpus,
        landscape,
        latency,
        pareto,
        pipeline,
        profile,
        ranks,
        roofline,
        time_to_answer,
        timeline,
    )

    return {
        "exits": Drawing(exits.draw, exits.read_report),
        "calibration": Drawing(calibration.draw, calibration.read_report),
        "footprint": Drawing(footprint.draw),
        "latency": Drawing(latency.draw),
        "time-to-answer": Drawing(time_to_answer.draw),
        "timeline": Drawing(timeline.draw),
        "ranks": Drawing(ranks.draw, read_swept, ranks.redraw),
        "landscape": Drawing(landscape.draw, read_swept, landscape.redraw),
        "pareto": Drawing(pareto.draw),
        "roofline": Drawing(roofline.draw),
        "profile": Drawing(profile.draw),
        "pipeline": Drawing(pipeline.draw),
        "gpus": Drawing(gpus.draw),
        "doctor": Drawing(doctor.draw),
    }[name]


#: Records of a sweep, in the repository only: 11 MB.
SWEPT = ("h200/sweep.jsonl.gz",)
#: In the order of the gallery.
FIGURES = (
    FigureKind(
        "exits",
        "How many images leave at each exit, and how often they are right.",
        ("demo",),
        ("cpu/demo-digits.json",),
        "auxhead demo",
        _drawing,
    ),
    FigureKind(
        "calibration",
        "Confidences before and after temperatures, where samples leave, and what the thresholds were chosen from.",
        ("calibrate",),
        ("cpu/calibration-digits.json",),
        "auxhead calibrate --checkpoint DIR",
        _drawing,
    ),
    FigureKind(
        "footprint",
        "Overlap and trunk stretch against SM occupancy by the heads, and where overlap stops being free.",
        ("footprint",),
        ("h200/footprint.jsonl",),
        "auxhead-tune footprint resnet18 --classes 10 --batch 1 --batch 32",
        _drawing,
    ),
    FigureKind(
        "latency",
        "Latency against batch size with all baselines, and what heads add to the network without.",
        ("bench",),
        ("h200/bench.jsonl",),
        "auxhead-tune bench",
        _drawing,
    ),
    FigureKind(
        "time-to-answer",
        "Time to the answer against the exit where all samples leave, with the network cut off there as the floor.",
        ("bench",),
        ("h200/bench.jsonl",),
        "auxhead-tune bench",
        _drawing,
    ),
    FigureKind(
        "timeline",
        "What runs beside what in one replay: trunk and heads over time, and the SMs that the heads' programs are on.",
        KINDS,
        ("h200/overlap.jsonl",),
        "auxhead-tune overlap MODEL",
        _drawing,
    ),
    FigureKind(
        "ranks",
        "Ranks of launch configurations alone and in the network: is the fastest alone the fastest there, too?",
        ("sweep",),
        SWEPT,
        "auxhead-tune sweep resnet18",
        _drawing,
    ),
    FigureKind(
        "landscape",
        "Time of heads alone over two fields of their launch configuration, with the noise and what was not tried.",
        ("sweep",),
        SWEPT,
        "auxhead-tune sweep resnet18",
        _drawing,
    ),
    FigureKind(
        "pareto",
        "How much sooner answers come for how much accuracy, by runner and batch size.",
        ("pareto",),
        ("h200/pareto.jsonl",),
        "auxhead-tune pareto --checkpoint DIR",
        _drawing,
    ),
    FigureKind(
        "roofline",
        "How far heads alone are from the memory's bandwidth, and which wait for latency instead.",
        ("heads",),
        ("h200/heads.jsonl",),
        "auxhead-tune heads resnet18",
        _drawing,
    ),
    FigureKind(
        "profile",
        "Launches and CUDA API time of one request, naive early exit before and a runner after.",
        ("profile",),
        ("h200/profile.jsonl",),
        "auxhead-tune profile --checkpoint DIR",
        _drawing,
    ),
    FigureKind(
        "pipeline",
        "Images a second over two GPUs against the size of micro-batches, with what stages and link allow.",
        ("pipeline",),
        ("h200/pipelines.jsonl",),
        "auxhead-tune bench --devices 2",
        _drawing,
    ),
    FigureKind(
        "gpus",
        "When each of two GPUs computes in one request: model-parallel, the tutorial's pipeline, and ours.",
        ("gpus",),
        ("h200/pipelines.jsonl",),
        "auxhead-tune bench --devices 2",
        _drawing,
    ),
    FigureKind(
        "doctor",
        "The last diagnosis: a timeline of one request, the host and stream by stream, with what was found marked.",
        ("doctor",),
        ("h200/doctor.jsonl",),
        "auxhead-tune doctor TARGET",
        _drawing,
    ),
)
