"""Work of ``auxhead demo``: trains a small network, chooses thresholds, and lets a held-out test split leave early."""

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ...kernels.reference.criteria import CRITERIA
from ..answers.exit_result import joined
from ..basics.files import replacing
from ..basics.machine import package_version
from ..basics.preprocessing import Preprocessing
from ..calibration.report import report_environment
from ..calibration.samples import collect_logits
from ..calibration.thresholds import exit_indices, exit_scores, thresholds_at_error_rate
from ..network.early_exit_network import EarlyExitNetwork
from ..network.learned_from import LearnedFrom, fingerprint
from ..saving.checkpoint import save_checkpoint
from ..training.data_sets import Split, Splits, read_splits
from ..training.plan import TrainingPlan, epochs_for
from ..training.sources import LabelledImages
from .small_resnet import BACKBONE, BLOCKS, small_early_exit_network
from .train_run import StartPhase, in_order, train_on_pixels

#: The value of ``format`` in ``report.json``; figures refuse others.
REPORT_FORMAT = "auxhead demo report 1"
#: Error rates that the search for thresholds tries, each for all heads alike.
_ERROR_RATES = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32)
#: The choice is this many rates stricter than the best one, by so many folds of cross-validation.
_STEPS_BACK, _FOLDS = 2, 5


class DemoRun(NamedTuple):
    """The trained and calibrated network, the content of ``report.json``, and the images that could be read."""

    network: EarlyExitNetwork
    report: dict[str, Any]
    source: LabelledImages
    splits: Splits


def run_demo(
    source: LabelledImages,
    *,
    preprocessing: Preprocessing,
    device: torch.device,
    seed: int,
    epochs: int | None,
    max_accuracy_drop: float,
    skip_damaged: bool,
    tell: Callable[[str], object],
    start_phase: StartPhase,
) -> DemoRun:
    """Train ``resnet18_small`` with a head behind every block, calibrate it, and evaluate it on the test split.

    Options are those of the command; ``tell`` takes lines about images that were left out, before training begins.
    ``BadInput`` for images that cannot be read or split. In the report shares and accuracies are from 0 to 1, sizes are
    pixels, times seconds.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        advance_reading = start_phase("reading images", len(source.open))
        source, splits = read_splits(
            source, preprocessing, seed, skip_damaged=skip_damaged, tell=tell, on_image=lambda: advance_reading(1, "")
        )

    with _timed(seconds, "train"):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = small_early_exit_network(len(source.classes)).to(device)
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # trains a tenth faster
        network.learned_from = LearnedFrom(None, fingerprint(network))  # nothing yet
        network.preprocessing = preprocessing
        batch_size = min(32, len(splits.train.labels))
        plan = TrainingPlan(epochs=epochs or epochs_for(len(splits.train.labels), batch_size))
        train_on_pixels(network, splits.train, plan, batch_size, seed, start_phase)

    with _timed(seconds, "calibrate"):
        validation = calibrate_demo(network, splits.validation, max_accuracy_drop)

    with _timed(seconds, "evaluate"):
        found = _evaluate(network, splits.test)

    report = {
        "format": REPORT_FORMAT,
        "data": source.name,
        "classes": len(source.classes),
        "image_size": preprocessing.crop,
        "seed": seed,
        "epochs": plan.epochs,
        "images": {name: len(split.labels) for name, split in zip(Splits._fields, splits, strict=True)},
        **found,
        "blocks": len(BLOCKS),
        "max_accuracy_drop": max_accuracy_drop,
        "validation": validation,
        "latency": None,  # rows of ``demo_latency``, where there is a CUDA device
        "environment": _environment(device),
        "seconds": seconds,
    }
    return DemoRun(network, report, source, splits)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


def calibrate_demo(network: EarlyExitNetwork, validation: Split, max_accuracy_drop: float) -> dict[str, float]:
    """Set thresholds that a validation split allows; returns its accuracies, of early exit and of the classifier."""
    found = collect_logits(network, in_order(validation, network))
    heads = len(network.taps)
    scores = exit_scores(found.logits[:-1], ["max_prob"] * heads, [1.0] * heads)
    correct = found.logits.argmax(2) == found.labels
    thresholds = choose_thresholds(scores, correct, max_accuracy_drop)
    network.set_rules(dict(zip(network.taps, thresholds.tolist(), strict=True)))
    if network.learned_from is not None:
        network.learned_from = network.learned_from.plus("thresholds", validation.samples())
    right = correct.gather(0, exit_indices(scores, thresholds)[None])[0]
    return {"accuracy": right.double().mean().item(), "full_accuracy": correct[-1].double().mean().item()}


def choose_thresholds(scores: Tensor, correct: Tensor, max_accuracy_drop: float) -> Tensor:
    """Choose a ``max_prob`` threshold [E] for each head; nothing is proven about other samples.

    A bound as that of ``calibrate_network`` takes more samples than the demo has. For an error rate, each head takes
    the smallest threshold that keeps it (:func:`thresholds_at_error_rate`), by all samples: earlier heads leave it few.

    Of several rates, the one is taken under which samples leave earliest (by the mean of their exit indices) while
    accuracy drops by at most ``max_accuracy_drop``: on the split itself, which always holds for the result, and in
    five-fold cross-validation. The best of several still fits accidents of a small split: if it loses samples in
    cross-validation, the result is two rates stricter (one, if no head would exit otherwise), in the spirit of the
    one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984). If no rate will do, no head
    exits.

    Args:
        scores: [E, M] float32, of each head, 0 to 1.
        correct: [E + 1, M] bool, true where a head or, last, the classifier is right.
        max_accuracy_drop: 0.005 is half a percentage point.
    """
    heads, samples = scores.shape
    needed = int(correct[-1].sum()) - max_accuracy_drop * samples - 1e-6  # samples that must be answered right
    best, earliest = torch.ones(heads), float(heads)
    stricter: list[Tensor] = []  # candidates that hold and let some samples leave, the strictest first
    for rate in _ERROR_RATES:
        candidate = _at_error_rate(scores, correct, rate)
        exits = exit_indices(scores, candidate)
        mean_exit = exits.double().mean().item()
        if correct.gather(0, exits[None]).sum() < needed or mean_exit == heads:
            continue
        stricter.append(candidate)
        held_out = _lost_held_out(scores, correct, rate)
        if mean_exit < earliest and held_out <= max_accuracy_drop * samples + 1e-6:
            earliest = mean_exit
            best = stricter[-1 - _STEPS_BACK :][0] if held_out else candidate
    return best


def _at_error_rate(scores: Tensor, correct: Tensor, rate: float) -> Tensor:
    return thresholds_at_error_rate(scores, correct, rate, [CRITERIA["max_prob"].range] * len(scores))


def _lost_held_out(scores: Tensor, correct: Tensor, rate: float) -> int:
    """Count, in cross-validation, the samples that the classifier gets right and early exit gets wrong.

    Samples that only a head gets right do not make up for them: on another split they may not be there.
    """
    fold = torch.arange(scores.shape[1]) % _FOLDS
    lost = 0
    for held_out in range(_FOLDS):
        own = fold == held_out
        exits = exit_indices(scores[:, own], _at_error_rate(scores[:, ~own], correct[:, ~own], rate))
        lost += int((correct[-1, own] & ~correct[:, own].gather(0, exits[None])[0]).sum())
    return lost


def _evaluate(network: EarlyExitNetwork, test: Split) -> dict[str, Any]:
    """Return what the report says of the test split: in total, and a row for each head and, last, the classifier."""
    of_all = collect_logits(network, in_order(test, network)).logits.argmax(2) == test.labels  # [E + 1, M]
    label, _, _, exit_index = joined([network(x) for x, _ in in_order(test, network)]).cpu()
    right = label == test.labels
    exits = []
    for index, name in enumerate([*network.taps, "classifier"]):
        left = exit_index == index
        exits.append({
            "name": name,
            "threshold": network.exit_heads[index].rule.threshold if index < len(network.taps) else None,
            "images": int(left.sum()),
            "share": left.double().mean().item(),
            "accuracy": right[left].double().mean().item() if left.any() else None,
            "accuracy_on_all": of_all[index].double().mean().item(),  # if it answered for the whole split
        })  # fmt: skip
    accuracy, full_accuracy = right.double().mean().item(), of_all[-1].double().mean().item()
    return {
        "exits": exits,
        "accuracy": accuracy,
        "full_accuracy": full_accuracy,
        "accuracy_drop_points": 100.0 * (full_accuracy - accuracy),
        "left_before_last_block": (exit_index < len(BLOCKS) - 1).double().mean().item(),
        "mean_blocks": (exit_index + 1).clamp(max=len(BLOCKS)).double().mean().item(),
    }


def _environment(device: torch.device) -> dict[str, Any]:
    """Return the machine and the versions that a report's numbers belong to."""
    return {
        **report_environment(device),
        "device_type": device.type,
        "cpu_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: package_version(name) for name in ("torchvision", "triton")},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def save_demo(directory: Path, run: DemoRun) -> list[Path]:
    """Write the checkpoint; returns files of up to ten test images, one a class, made if there are none."""
    report, source, test = run.report, run.source, run.splits.test
    accuracy = {"test": report["accuracy"], "test_full_network": report["full_accuracy"]}
    save_checkpoint(
        directory, run.network, backbone=BACKBONE, classes=source.classes, accuracy=accuracy,
    )  # fmt: skip
    examples = []
    for label, name in enumerate(source.classes[:10]):
        of_class = test.indices[test.labels == label].tolist()
        if not of_class:
            continue
        if source.paths is not None:
            examples.append(source.paths[of_class[0]])
            continue
        folder = directory / "examples"
        if folder.is_symlink():  # a link is replaced, and not written through
            folder.unlink()
        folder.mkdir(exist_ok=True)
        examples.append(folder / f"{name}.png")
        with replacing(examples[-1]) as unfinished:
            source.open[of_class[0]]().save(unfinished)
    return examples


def print_report(console: Console, report: Mapping[str, Any]) -> None:
    """Print how the exits did on the test split, and the latencies if they were measured."""
    images = report["images"]["test"]
    table = Table(title=f"Test split: {images:,} images that neither training nor thresholds have seen")
    table.add_column("exit")
    for column in (
        "leaves if\nconfidence >",
        "images that\nleave here",
        "their\naccuracy",
        "accuracy if it\nanswered all",
    ):
        table.add_column(column, justify="right")
    for index, row in enumerate(report["exits"]):
        threshold, accuracy = row["threshold"], row["accuracy"]
        table.add_row(
            f"{index}: {row['name']}",
            "the rest" if threshold is None else "never" if threshold >= 1.0 else f"{threshold:.3f}",
            f"{row['images']:,} ({row['share']:.1%})",
            "-" if accuracy is None else f"{accuracy:.1%}",
            f"{row['accuracy_on_all']:.1%}",
        )
    console.print(table)
    points = f"{-report['accuracy_drop_points']:+.2f}"
    difference = "no difference" if float(points) == 0.0 else f"{points} percentage points"
    console.print(
        f"Early exit: {report['accuracy']:.2%} accuracy; full network: {report['full_accuracy']:.2%} ({difference}).\n"
        f"{report['left_before_last_block']:.1%} of the images left before the last block; on average an image had its "
        f"answer after {report['mean_blocks']:.1f} of {report['blocks']} blocks (counted, not timed).",
        soft_wrap=True,
    )
    if report["latency"] is None:
        console.print("Latency was not measured: the demo ran on the CPU, without a CUDA device.")
    else:
        console.print(_latency_table(report["latency"], report["environment"]["device"]))


def _latency_table(rows: Sequence[Mapping[str, Any]], device: str) -> Table:
    table = Table(title=f"Latency, eager float32 on {device}, median (20th to 80th percentile)")
    for column in ("batch", "run as", "heads", "device, us", "host to answer, us"):
        table.add_column(column, justify="left" if column in ("run as", "heads") else "right")
    for row in rows:
        times = ["{median:,.0f}\n({p20:,.0f}-{p80:,.0f})".format(**row[kind]) for kind in ("device_us", "host_us")]
        table.add_row(str(row["batch"]), row["mode"], row["variant"], *times)
    return table
