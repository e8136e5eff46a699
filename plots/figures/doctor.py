"""Figure "doctor": the timeline of one request, the host and stream by stream, with what the doctor found marked."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import blended_transform_factory

from ...autotune.records.record import Record
from ..records import NoRecords, stamp
from ..style import AMBER, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, frame, new_figure, note, tidy

#: Colours and labels of what runs, by role in the record.
ROLES = {
    "launch": (SKY, "launches"),
    "wait": (ORANGE, "waits for the device"),
    "allocate": (AMBER, "takes memory"),
    "kernel": (BLUE, "kernels"),
    "head": (GREEN, "heads"),
    "copy": (PURPLE, "copies"),
    "fill": (GREY, "fills"),
}
#: Findings that are marked; the others are counted.
MOST = 6


def doctor_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return the streams and findings of the last diagnosis: microseconds since the request began."""
    found = [one for one in records if (one.kind, one.error) == ("doctor", None)]
    if not found:
        raise NoRecords("no diagnosis among the records")
    record = found[-1]
    assert record.measured is not None
    measured = record.measured
    return {
        "title": _title(record.cell["target"], measured),
        "stamp": stamp(
            [record],
            "One request under torch.profiler, which makes calls of the host longer than they are in the title's time.",
        ),
        "lanes": {"host": [one for one in measured["calls"] if one[2] in ROLES], **_streams(measured["streams"])},
        "findings": [_finding(number, one) for number, one in enumerate(measured["findings"][:MOST], start=1)],
        "more": max(0, len(measured["findings"]) - MOST),
    }


def _title(target: str, measured: Mapping[str, Any]) -> str:
    took, possible = measured["achieved_us"], measured["possible_us"]
    gpu = f"needs {possible:,.0f} at least" if measured["is_split"] else f"works {possible:,.0f}"
    return f"{target}:\n{took:,.0f} us a request, of which the GPU {gpu}"


def _streams(streams: Sequence[Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    several = len({one["device"] for one in streams}) > 1
    lanes = {}
    for one in streams:
        name = f"stream {one['stream']}" if one["stream"] != 7 else "default stream"
        name = f"GPU {one['device']}, {name}" if several else name
        lanes[name if one["priority"] is None else f"{name}\npriority {one['priority']}"] = one["work"]
    return lanes


def _finding(number: int, found: Mapping[str, Any]) -> dict[str, Any]:
    cost = "" if found["cost_us"] is None else f", {found['cost_us']:,.0f} us"
    where = f", {found['lines'][0]}" if found["lines"] else ""
    return {"said": f"{number}  {found['kind']}{cost}{where}: {found['what']}", "marks": found["marks"]}


def doctor_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw a lane for the host and each stream, with findings underlined, and the findings in words below."""
    lanes, findings = numbers["lanes"], numbers["findings"]
    lines = [one["said"] for one in findings] or ["No finding."]
    lines += [f"and {numbers['more']} more"] if numbers["more"] else []
    figure = new_figure(1.6 + 0.5 * len(lanes) + 0.22 * len(lines))
    axes, below = figure.subplots(2, 1, height_ratios=[0.6 + 0.5 * len(lanes), 0.22 * len(lines)])
    height = {name: len(lanes) - 1 - index for index, name in enumerate(lanes)}
    roles = [role for role in ROLES if any(one[2] == role for lane in lanes.values() for one in lane)]
    for name, lane in lanes.items():
        for role in roles:
            bars = [(start, end - start) for start, end, its in lane if its == role]
            axes.broken_barh(bars, (height[name] + 0.15, 0.5), color=ROLES[role][0], linewidth=0)
    _marks(axes, findings, height)
    axes.set_yticks([at + 0.4 for at in height.values()], list(height))
    tidy(axes, "x", ylim=(-0.05, len(lanes) + 0.05), xlabel="us since the request began, under the profiler")
    axes.tick_params(axis="y", length=0)
    handles = [Patch(color=ROLES[role][0], label=ROLES[role][1]) for role in roles]
    axes.legend(handles=handles, frameon=False, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=7, fontsize=8)
    below.axis("off")
    left = blended_transform_factory(figure.transFigure, below.transAxes)
    said = "\n".join(line if len(line) <= 135 else f"{line[:132]}..." for line in lines)
    text = below.text(0.01, 1.0, said, va="top", fontsize=8, transform=left)
    text.set_in_layout(False)  # it is wider than the axes
    return frame(figure, numbers)


def _marks(axes: Axes, findings: Sequence[Mapping[str, Any]], height: Mapping[str, int]) -> None:
    """Underline what findings are about, with their numbers; each on the lane that it is of, the host by default."""
    names = {lane.partition("\n")[0].rpartition(", ")[2]: lane for lane in reversed([*height])}
    numbers: dict[tuple[float, float], list[str]] = {}
    for number, one in enumerate(findings, start=1):
        for index, mark in enumerate(one["marks"]):
            stream = "default stream" if mark["stream"] == 7 else f"stream {mark['stream']}"
            at = height[names.get(stream, "host")]
            ends = [mark["start_us"], mark["end_us"]]
            axes.plot(ends, [at + 0.04] * 2, color=ORANGE, linewidth=3, solid_capstyle="butt")
            if index == 0:
                numbers.setdefault((mark["start_us"], at + 0.65), []).append(str(number))
    for place, its in numbers.items():
        note(axes, ", ".join(its), place, (0, 1), fontsize=9, color=ORANGE)
