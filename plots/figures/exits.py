"""Figure "exits": how many images leave at each exit of the demo's network, and how many of them are right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ...autotune.records.checks import NUMBER, TEXT, WHOLE, Maybe
from ..records import Known, read_one_report
from ..style import BLUE, GREY, ORANGE, frame, new_figure, note, tidy

#: All that it reads of a report.
_REPORT = {
    "data": TEXT,
    **dict.fromkeys(("image_size", "seed"), WHOLE),
    "images": dict.fromkeys(("train", "validation", "test"), WHOLE),
    **dict.fromkeys(("accuracy", "full_accuracy", "left_before_last_block"), NUMBER),
    "exits": [
        {
            "name": TEXT,
            "threshold": Maybe(NUMBER, absent=False),
            "images": WHOLE,
            **dict.fromkeys(("share", "accuracy_on_all"), NUMBER),
            "accuracy": Maybe(NUMBER, absent=False),
        }
    ],
    "environment": dict.fromkeys(("device", "python", "torch", "torchvision", "auxhead"), Maybe(TEXT, absent=False)),
}


def read(paths: Sequence[Path], kinds: Sequence[str], known: Known) -> dict[str, Any]:
    """Read one report.json of ``auxhead demo``; ``kinds`` and ``known`` are for records."""
    return read_one_report(paths, "auxhead demo", _REPORT)


def draw(report: Mapping[str, Any]) -> tuple[Figure, dict[str, Any]]:
    """Draw the figure, and return it with the numbers in it."""
    drawn = _drawn(report)
    return _figure(drawn), drawn


def _drawn(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the figure shows; shares and accuracies in percent."""
    exits = report["exits"]
    early, full = 100 * report["accuracy"], 100 * report["full_accuracy"]
    machine = report["environment"]
    images = report["images"]
    return {
        "title": (
            f"{100 * report['left_before_last_block']:.1f} % of the images leave before the last block;\n"
            f"accuracy {early:.1f} % against {full:.1f} % for the full network"
        ),
        "exits": [line["name"] for line in exits],
        "never": [line["threshold"] is not None and line["threshold"] >= 1.0 for line in exits],
        "images": [line["images"] for line in exits],
        "share_percent": [100 * line["share"] for line in exits],
        "accuracy_percent": [None if line["accuracy"] is None else 100 * line["accuracy"] for line in exits],
        "accuracy_on_all_percent": [100 * line["accuracy_on_all"] for line in exits],
        "full_accuracy_percent": full,
        "early_exit_accuracy_percent": early,
        "stamp": (
            f"{report['data']}, {report['image_size']}x{report['image_size']} px, ResNet-18 for small images, "
            f"seed {report['seed']}; images: train {images['train']:,}, validation {images['validation']:,}, "
            f"test {images['test']:,} (shown)\n"
            f"{machine['device']}, Python {machine['python']}, torch {machine['torch']}, "
            f"torchvision {machine['torchvision']}, auxhead {machine['auxhead']}"
        ),
    }


def _figure(drawn: Mapping[str, Any]) -> Figure:
    figure = new_figure(5.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1))
    places = range(len(drawn["exits"]))
    above.bar(places, drawn["share_percent"], color=BLUE, width=0.62)
    shares = zip(places, drawn["share_percent"], drawn["images"], drawn["never"], strict=True)
    for place, share, images, never in shares:
        text = "no exit" if never else f"{share:.1f} %\n({images:,})"
        note(above, text, (place, share), (0, 3), ha="center", color=GREY if never else "black")
    above.set_ylabel("images that leave here,\n% of all (count)")
    above.set_ylim(0, 1.35 * max(drawn["share_percent"]))
    below.plot(
        places, drawn["accuracy_on_all_percent"], "o--", color=GREY, markerfacecolor="white",
        label="exit, if it answered all",
    )  # fmt: skip
    answering = [place for place in places if drawn["accuracy_percent"][place] is not None]
    accuracies = [drawn["accuracy_percent"][place] for place in answering]
    below.plot(answering, accuracies, "o", color=ORANGE, markersize=8, label="images that leave here")
    for place, accuracy in zip(answering, accuracies, strict=True):
        # the number must not cover the other point
        offset, va = (7, "bottom") if accuracy >= drawn["accuracy_on_all_percent"][place] else (-7, "top")
        note(below, f"{accuracy:.1f}", (place, accuracy), (0, offset), ha="center", va=va, color=ORANGE)
    below.axhline(drawn["full_accuracy_percent"], color="black", linewidth=1, label="full network")
    below.set_ylabel("accuracy, %")
    low = min(99.0, *drawn["accuracy_on_all_percent"], *accuracies)
    bottom = low - 0.08 * (100.0 - low)
    below.set_ylim(max(-2.0, bottom), 100.0 + 0.2 * (100.0 - low))
    below.set_yticks([tick for tick in below.get_yticks() if bottom <= tick <= 100.0])
    below.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    below.set_xticks(list(places), drawn["exits"])
    below.set_xlabel("exit, in the order in which the network runs (head behind a block; last, the classifier)")
    for axes in (above, below):
        tidy(axes)
    return frame(figure, drawn)
