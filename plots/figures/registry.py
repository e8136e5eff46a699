"""The list of all figures, with the records that each is drawn from and the command that measures them."""

from ..figure_kind import FigureKind
from ..timelines import KINDS
from . import exits, footprint, landscape, latency, pareto, profile, ranks, roofline, time_to_answer, timeline

#: Records of a sweep, in the repository only: 11 MB.
SWEPT = ("h200/sweep.jsonl.gz",)
#: In the order of the gallery.
FIGURES = (
    FigureKind("exits", exits.draw, ("demo",), ("cpu/demo-digits.json",), "auxhead demo", exits.read_report),
    FigureKind(
        "footprint",
        footprint.draw,
        ("footprint",),
        ("h200/footprint.jsonl",),
        "auxhead-tune footprint resnet18 --classes 10 --batch 1 --batch 32",
    ),
    FigureKind("latency", latency.draw, ("bench",), ("h200/bench.jsonl",), "auxhead-tune bench"),
    FigureKind("time-to-answer", time_to_answer.draw, ("bench",), ("h200/bench.jsonl",), "auxhead-tune bench"),
    FigureKind("timeline", timeline.draw, KINDS, ("h200/overlap.jsonl",), "auxhead-tune overlap MODEL"),
    FigureKind("ranks", ranks.draw, ("sweep",), SWEPT, "auxhead-tune sweep resnet18", redraw=ranks.redraw),
    FigureKind("landscape", landscape.draw, ("sweep",), SWEPT, "auxhead-tune sweep resnet18", redraw=landscape.redraw),
    FigureKind("pareto", pareto.draw, ("pareto",), ("h200/pareto.jsonl",), "auxhead-tune pareto --checkpoint DIR"),
    FigureKind("roofline", roofline.draw, ("heads",), ("h200/heads.jsonl",), "auxhead-tune heads resnet18"),
    FigureKind("profile", profile.draw, ("profile",), ("h200/profile.jsonl",), "auxhead-tune profile --checkpoint DIR"),
)
