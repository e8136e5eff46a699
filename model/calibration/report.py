"""The report of a calibration: what was chosen, what is promised, and what the untouched test split says of it."""

import dataclasses
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..basics.machine import package_version, processor_name
from ..basics.tables import text_table, wrapped
from ..network.early_exit_network import EarlyExitNetwork
from .exit_latency import ExitLatencies
from .thresholds import Reliability, reliability

#: The value of ``format``; figures refuse others.
REPORT_FORMAT = "auxhead calibration report 1"
#: What columns of a report's table are.
LEGEND = (
    "Right of all: if this exit answered for all images, as a network cut off there does. Off by: how far its "
    "confidence is from the rate of right answers, before / after its temperature (ECE)."
)


@dataclass(frozen=True)
class Bound:
    """What holds for new samples of the same distribution with the stated confidence; see the module ``search``."""

    confidence: float
    """0.9: for at most one split of thresholds in ten it does not hold."""
    max_accuracy_drop: float
    """Accuracy under the thresholds is lower than the classifier's by at most this; 0 where nobody leaves early."""
    reachable: bool
    """False: no candidate keeps the budget, and nobody leaves early; or one of latency or work is below all of them."""
    reason: str | None
    """Why it is not, and the best that is; else None."""
    samples: int
    """Of the split for thresholds."""
    lost: int
    """Of these, samples that the classifier gets right and early exit gets wrong."""
    unknown: str | None = None
    """Why it is not known whether the network has learned from these samples: nothing is promised then; else None."""


@dataclass(frozen=True)
class CalibratedExit:
    """One exit on the test split; shares and accuracies are from 0 to 1."""

    name: str
    """The tap, or "classifier"."""
    criterion: str
    """What the score is, see :class:`ExitRule`."""
    temperature: float
    """Of the classifier it is for the reader alone: a network answers there without one."""
    threshold: float | None
    """The score that a sample must exceed; None where nobody leaves by it: a head that never exits, the classifier."""
    samples: int
    """Number of samples that left here."""
    share: float
    """The same as a share of all samples."""
    accuracy: float | None
    """Accuracy on the samples that left here; None where none did."""
    accuracy_on_all: float
    """Accuracy if this exit answered for all: the network cut off here, a smaller static model."""
    work: float
    """Done of the backbone when a sample leaves here, as a share of its FLOPs."""
    latency_ms: float | None
    """When a whole batch leaves here; None if it was not measured."""
    stayed: int
    """Number of samples that went on past this exit; 0 of the classifier."""
    never_right: int
    """Of those, samples that no later exit gets right: to let them go here would have cost no accuracy."""
    before: Reliability
    """Of the largest probability, at temperature 1."""
    after: Reliability
    """At the fitted temperature."""


@dataclass(frozen=True)
class CalibratedClass:
    """One class on the test split; shares and accuracies are from 0 to 1, and None where it has no samples."""

    name: str
    """The label, as a number, or its name where ``auxhead calibrate`` knows it."""
    samples: int
    """Number of samples of the class."""
    accuracy: float | None
    """Accuracy of early exit on the class's samples."""
    full_accuracy: float | None
    """Accuracy of the classifier on the same samples."""
    shares: list[float] | None
    """Of the samples that leave at each exit."""
    mean_exit: float | None
    """Mean exit index."""


@dataclass(frozen=True)
class CurvePoint:
    """One candidate on the split for thresholds; the first is no exit at all, and each lets samples leave earlier."""

    thresholds: list[float | None]
    """For each head; None never exits."""
    lost: int
    """Number of samples that the classifier gets right and early exit gets wrong."""
    p_value: float | None
    """That accuracy drops by more than the budget; None for one of latency or work, where none is tested."""
    holds: bool | None
    """True where this and all before it passed; None as above."""
    accuracy: float
    """Share of right answers of early exit."""
    shares: list[float]
    """Of the samples that leave at each exit."""
    mean_exit: float
    """Mean exit index."""
    work: float
    """Mean work of a sample, as a share of the backbone's FLOPs."""
    latency_ms: float | None
    """Expected; None without measured latencies."""


@dataclass(frozen=True)
class CalibrationReport:
    """The result of :func:`calibrate_network`; shares and accuracies are from 0 to 1, latencies milliseconds."""

    format: str
    """Of the JSON."""
    data: str | None
    """Name of the data, for people."""
    seed: int | None
    """Of the splits; None where they were given."""
    samples: dict[str, int]
    """Number of samples in each split."""
    left_out: int
    """Number of samples that the network has learned from, and that are in none."""
    parameters: list[str]
    """Hashes of those that the network has."""
    rules: list[list[float]]
    """``ExitRule.numbers`` of each head, as they were set."""
    chance: str | None
    """That the classifier is no better than chance on the samples of all splits, if it is not; else None."""
    budget: dict[str, float]
    """``max_accuracy_drop``, ``max_latency_ms`` or ``max_work``, as asked for."""
    bound: Bound
    """What is promised for samples to come."""
    exits: list[CalibratedExit]
    """The heads, then the classifier, on the test split."""
    classes: list[CalibratedClass]
    """In the order of the labels, on the test split."""
    accuracy: float
    """Accuracy of early exit on the test split."""
    full_accuracy: float
    """Accuracy of the classifier on the same samples."""
    accuracy_drop: float
    """The difference; less than 0 where early exit is better."""
    mean_exit: float
    """Mean exit index on the test split."""
    expected_work: float
    """Mean work of a sample on the test split, as a share of the backbone's FLOPs."""
    latencies: ExitLatencies | None
    """As measured."""
    expected_latency_ms: float | None
    """On the test split, at the batch size of the latencies."""
    static_accuracy: float | None
    """Accuracy of the given other model on the test split."""
    chosen: int
    """Index of the chosen candidate in ``curve``."""
    curve: list[CurvePoint]
    """The candidates on the split for thresholds, from no exit at all on."""
    environment: dict[str, Any]
    """Versions and device, for people."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values: dicts, lists, numbers, strings and None."""
        content = dataclasses.asdict(self)
        if self.latencies is not None:
            content["latencies"]["milliseconds"] = list(self.latencies.milliseconds)
        return content

    def __repr__(self) -> str:
        """Say it in 80 columns: that the classifier is no better than chance, if so; exits, as a table; sentences."""
        first = [] if self.chance is None else [self.chance]
        said = f"Test split, {self.samples['test']:,} samples:"
        return "\n".join([wrapped([*first, said]), text_table(self.rows()), wrapped([LEGEND, *self.sentences()])])

    def rows(self) -> list[list[str]]:
        """Return headings, and what is said of each exit on the test split, as text; ``LEGEND`` says what is meant."""
        head = ["exit", "leave if\nscore >", "leave\nhere", "right\nof these", "right\nof all", "temper-\nature"]
        head += ["off by, %", "work", *([] if self.latencies is None else ["answer\nin, ms"])]
        rows = [head]
        for index, row in enumerate(self.exits):
            last = row is self.exits[-1]
            rows.append([
                f"{index}: {row.name}",
                "the rest" if last else "never" if row.threshold is None else f"{row.threshold:.3f}",
                f"{row.share:.1%}",
                "-" if row.accuracy is None else f"{row.accuracy:.1%}",
                f"{row.accuracy_on_all:.1%}",
                f"{row.temperature:.2f}",
                f"{100 * row.before.ece:.1f} / {100 * row.after.ece:.1f}",
                f"{row.work:.1%}",
                *([] if row.latency_ms is None else [f"{row.latency_ms:.3g}"]),
            ])  # fmt: skip
        return rows

    def sentences(self) -> list[str]:
        """Say what was found and what is promised; not that the classifier is no better than chance."""
        bound = self.bound
        lines = [
            f"Early exit is right about {self.accuracy:.2%}, the full network about {self.full_accuracy:.2%}. On "
            f"average a sample left at exit {self.mean_exit:.1f} of 0 to {len(self.exits) - 1}.",
            "Work is the share of the backbone's FLOPs that a sample takes; on average it was "
            f"{self.expected_work:.1%}.",
        ]
        if self.left_out:
            lines.append(f"Left out are {self.left_out:,} samples that it has learned from.")
        if bound.reason is not None:
            lines.append(f"The budget cannot be kept: {bound.reason}.")
        if bound.unknown is not None:
            lines.append(
                "Nothing is promised of accuracy on new samples, since it is not known what it learned from: "
                f"{bound.unknown}. If you know, say it: --train-data FOLDER, or none; in Python train=, set() for none."
            )
        elif bound.max_accuracy_drop > 0.0:
            lines.append(
                f"With {bound.confidence:.0%} confidence, accuracy on new samples like these drops by at most "
                f"{bound.max_accuracy_drop:.2%}: of {bound.samples:,} samples for thresholds, {bound.lost:,} were lost "
                "to early exit."
            )
        if self.latencies is not None:
            lines.append(
                f"Expected time to the answer of a batch of {self.latencies.batch_size:,}: "
                f"{self.expected_latency_ms:.3g} ms; {self.latencies.milliseconds[-1]:.3g} ms if nobody leaves early "
                f"({self.latencies.runner}, {self.latencies.device})."
            )
        in_vain = [
            f"{row.never_right:,} of {row.stayed:,} past {row.name}" for row in self.exits[:-1] if row.never_right
        ]
        if in_vain:
            lines.append(f"Samples that went on although no later exit is right: {', '.join(in_vain)}.")
        within = [row for row in self.exits[:-1] if row.accuracy_on_all >= self.accuracy]
        if within:
            lines.append(f"The network cut off at {within[0].name} is right as often on these samples, without rules.")
        return lines


def reported(threshold: float, highest: float) -> float | None:
    """Return a threshold for the report: None for the end of the range, which never exits."""
    return None if threshold >= highest or not math.isfinite(threshold) else threshold


def report_environment(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions that a report belongs to."""
    processor = processor_name() or platform.processor() or "CPU"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "auxhead")},
    }


def exits_on_test(
    network: EarlyExitNetwork,
    logits: Tensor,
    labels: Tensor,
    exits: Tensor,
    temperatures: Sequence[float],
    thresholds: Sequence[float | None],
    work: Sequence[float],
    latencies: ExitLatencies | None,
) -> list[CalibratedExit]:
    """Return a row for each head and, last, for the classifier.

    ``logits`` [E + 1, M, K], ``labels`` and ``exits`` [M] are of the test split, ``temperatures`` and ``work`` of E + 1
    exits, ``thresholds`` of E, None for a head that never exits.

    The question of ``never_right`` is that of early-exit failure prediction (Kubaty et al., 2025, arXiv:2508.21495): a
    sample is to leave where this exit is right, or where no later one would be. The second half is counted here, of
    those that stayed; nothing else is taken from there.
    """
    names = [*network.taps, "classifier"]
    correct = logits.argmax(2) == labels  # [E + 1, M]
    criteria = [*(head.rule.criterion for head in network.exit_heads), "max_prob"]
    rows = []
    for index, (name, threshold) in enumerate(zip(names, [*thresholds, None], strict=True)):
        right, left, stayed = correct[index], exits == index, exits > index
        rows.append(
            CalibratedExit(
                name=name,
                criterion=criteria[index],
                temperature=temperatures[index],
                threshold=threshold,
                samples=int(left.sum()),
                share=left.double().mean().item(),
                accuracy=right[left].double().mean().item() if left.any() else None,
                accuracy_on_all=right.double().mean().item(),
                work=work[index],
                latency_ms=None if latencies is None else latencies.milliseconds[index],
                stayed=int(stayed.sum()),
                never_right=int((stayed & ~correct[index + 1 :].any(0)).sum()),
                before=reliability(logits[index].softmax(1).amax(1), right),
                after=reliability((logits[index] / temperatures[index]).softmax(1).amax(1), right),
            )
        )
    return rows


def exits_by_class(labels: Tensor, exits: Tensor, correct: Tensor, classes: int) -> list[CalibratedClass]:
    """Return a row for each class, in the order of the labels, those without samples included.

    ``labels`` and ``exits`` are [M] int64; ``correct`` [E + 1, M] is true where an exit is right.
    """
    right = correct.gather(0, exits[None])[0]
    rows = []
    for label in range(classes):
        own = labels == label
        samples = int(own.sum())
        left = exits[own]
        rows.append(
            CalibratedClass(
                name=str(label),
                samples=samples,
                accuracy=right[own].double().mean().item() if samples else None,
                full_accuracy=correct[-1, own].double().mean().item() if samples else None,
                shares=(torch.bincount(left, minlength=len(correct)).double() / samples).tolist() if samples else None,
                mean_exit=left.double().mean().item() if samples else None,
            )
        )
    return rows


def most_telling(rows: Sequence[CalibratedClass], each: int) -> list[CalibratedClass]:
    """Return the classes that are right least often and those that leave latest, so many of either, as they stand."""
    seen = [(index, row.accuracy, row.mean_exit) for index, row in enumerate(rows)]
    wrong = sorted((accuracy, index) for index, accuracy, _ in seen if accuracy is not None)
    late = sorted((-mean_exit, index) for index, _, mean_exit in seen if mean_exit is not None)
    return [rows[index] for index in sorted({index for _, index in (*wrong[:each], *late[:each])})]
