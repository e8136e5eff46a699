"""The list of all figures, each drawn by the module of its name: its records, and the command that measures them."""

from ..figure_kind import FigureKind
from ..timelines import KINDS

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
    ),
    FigureKind(
        "calibration",
        "Confidences before and after temperatures, where samples leave, and what the thresholds were chosen from.",
        ("calibrate",),
        ("cpu/calibration-digits.json",),
        "auxhead calibrate --checkpoint DIR",
    ),
    FigureKind(
        "footprint",
        "Overlap and trunk stretch against SM occupancy by the heads, and where overlap stops being free.",
        ("footprint",),
        ("h200/footprint.jsonl",),
        "auxhead-tune overlap resnet18 --footprints --classes 10 --batch 1 --batch 32",
    ),
    FigureKind(
        "latency",
        "Latency against batch size with all baselines, and what heads add to the network without.",
        ("bench",),
        ("h200/bench.jsonl",),
        "auxhead-tune bench",
    ),
    FigureKind(
        "time-to-answer",
        "Time to the answer against the exit where all samples leave, with the network cut off there as the floor.",
        ("bench",),
        ("h200/bench.jsonl",),
        "auxhead-tune bench",
    ),
    FigureKind(
        "timeline",
        "What runs beside what in one replay: trunk and heads over time, and the SMs that the heads' programs are on.",
        KINDS,
        ("h200/overlap.jsonl",),
        "auxhead-tune overlap MODEL",
    ),
    FigureKind(
        "ranks",
        "Ranks of launch configurations alone and in the network: is the fastest alone the fastest there, too?",
        ("sweep",),
        SWEPT,
        "auxhead-tune sweep resnet18",
    ),
    FigureKind(
        "landscape",
        "Time of heads alone over two fields of their launch configuration, with the noise and what was not tried.",
        ("sweep",),
        SWEPT,
        "auxhead-tune sweep resnet18",
    ),
    FigureKind(
        "pareto",
        "How much sooner answers come for how much accuracy, by runner and batch size.",
        ("pareto",),
        ("h200/pareto.jsonl",),
        "",
    ),
    FigureKind(
        "roofline",
        "How far heads alone are from the memory's bandwidth, and which wait for latency instead.",
        ("heads",),
        ("h200/heads.jsonl",),
        "auxhead-tune heads resnet18",
    ),
    FigureKind(
        "profile",
        "Launches and CUDA API time of one request, naive early exit before and a runner after.",
        ("profile",),
        ("h200/profile.jsonl",),
        "auxhead-tune profile --checkpoint DIR",
    ),
    FigureKind(
        "pipeline",
        "Images a second over two GPUs against the size of micro-batches, with what stages and link allow.",
        ("pipeline",),
        ("h200/pipelines.jsonl",),
        "auxhead-tune bench --devices 2",
    ),
    FigureKind(
        "gpus",
        "When each of two GPUs computes in one request: model-parallel, the tutorial's pipeline, and ours.",
        ("gpus",),
        ("h200/pipelines.jsonl",),
        "auxhead-tune bench --devices 2",
    ),
    FigureKind(
        "doctor",
        "The last diagnosis: a timeline of one request, the host and stream by stream, with what was found marked.",
        ("doctor",),
        ("h200/doctor.jsonl",),
        "auxhead-tune doctor TARGET",
    ),
)
