"""The demo's experiment: train the network, choose thresholds, let a held-out test split leave early."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..calibration.evaluation import answers_of_all_exits, early_exit_answers
from ..calibration.thresholds import Calibration, calibrate
from ..early_exit_network import EarlyExitNetwork
from ..training.data_sets import LabelledImages, Split, Splits, decode, make_splits, split_indices
from ..training.deep_supervision import Step, TrainingPlan, train
from .report import REPORT_FORMAT, DemoReport, ExitReport, environment
from .small_resnet import BLOCKS, small_early_exit_network

#: Begins a phase of so many images for a progress bar; returns a function that counts images as done, with a remark.
StartPhase = Callable[[str, int], Callable[[int, str], None]]


@dataclass(frozen=True)
class DemoRun:
    """The trained and calibrated network, its report, and the images that it was made with."""

    network: EarlyExitNetwork
    report: DemoReport
    source: LabelledImages
    """The images that could be read; ``splits`` has their indices."""
    splits: Splits


def run_demo(
    source: LabelledImages,
    *,
    image_size: int,
    device: torch.device,
    seed: int = 0,
    epochs: int | None = None,
    max_accuracy_drop: float = 0.005,
    skip_damaged: bool = False,
    tell: Callable[[str], object] = lambda lines: None,
    start_phase: StartPhase = lambda name, total: lambda images, remark: None,
) -> DemoRun:
    """Train ``resnet18_small`` with a head behind every block, calibrate it, and evaluate it on the test split.

    Args:
        source: the images.
        image_size: pixels, height and width.
        device: where the network runs.
        seed: of splits, parameters, order and shifts.
        epochs: None chooses by the number of images.
        max_accuracy_drop: accuracy that early exit may cost on the validation split; 0.005 is half a percentage point.
        skip_damaged: leave out images that cannot be read.
        tell: takes lines about images that were left out, before training begins.
        start_phase: for a progress bar.

    Raises:
        BadInput: images that cannot be read or split.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "load"):
        split_indices(source, seed)  # refuses a class that is too small before anything is read
        advance_reading = start_phase("reading images", len(source.open))
        images = decode(source, image_size, lambda: advance_reading(1, ""), skip_damaged=skip_damaged)
        if images.damaged:
            tell(_describe_damaged(images.damaged, len(source.open)))
        source = images.source
        splits = make_splits(images, split_indices(source, seed))

    with _timed(seconds, "train"):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = small_early_exit_network(len(source.classes)).to(device)
        plan = TrainingPlan.choose(len(splits.train.labels), image_size, epochs)
        _train(network, splits.train, plan, seed, start_phase)

    with _timed(seconds, "calibrate"):
        calibration = calibrate_demo(network, splits.validation, max_accuracy_drop)

    with _timed(seconds, "evaluate"):
        report = _evaluate(network, splits.test, calibration)

    return DemoRun(
        network=network,
        source=source,
        splits=splits,
        report=DemoReport(
            format=REPORT_FORMAT,
            data=source.name,
            classes=len(source.classes),
            image_size=image_size,
            seed=seed,
            epochs=plan.epochs,
            images={name: len(split.labels) for name, split in zip(Splits._fields, splits, strict=True)},
            blocks=len(BLOCKS),
            max_accuracy_drop=max_accuracy_drop,
            validation={"accuracy": calibration.accuracy, "full_accuracy": calibration.full_accuracy},
            latency=None,
            environment=environment(device),
            seconds=seconds,
            **report,
        ),
    )


def _describe_damaged(damaged: Sequence[str], images: int, most: int = 3) -> str:
    """Say how many images were left out, and name the first few, a line each."""
    lines = [f"Left out {len(damaged):,} of {images:,} images, which cannot be read:", *damaged[:most]]
    return "\n  ".join([*lines, f"and {len(damaged) - most:,} more"] if len(damaged) > most else lines)


def _train(network: EarlyExitNetwork, split: Split, plan: TrainingPlan, seed: int, start_phase: StartPhase) -> None:
    """Train the network, with progress counted in images."""
    per_epoch = len(split.labels) // plan.batch_size * plan.batch_size
    advance = start_phase("training", per_epoch * plan.epochs)

    def on_step(step: Step) -> None:
        advance(step.images, f"epoch {step.epoch + 1} of {plan.epochs}, loss {step.loss:.2f}")

    train(network, split, plan, seed=seed, on_step=on_step)


def calibrate_demo(network: EarlyExitNetwork, validation: Split, max_accuracy_drop: float) -> Calibration:
    """Choose the thresholds on a validation split and set the network's rules to them."""
    answers = answers_of_all_exits(network, validation.pixels)
    correct = answers.label == validation.labels
    calibration = calibrate(answers.confidence[:-1], correct, max_accuracy_drop)
    network.set_rules(dict(zip(network.taps, calibration.thresholds, strict=True)))
    return calibration


def _evaluate(network: EarlyExitNetwork, test: Split, calibration: Calibration) -> dict[str, Any]:
    """Return the fields of :class:`DemoReport` that are about the test split."""
    of_all = answers_of_all_exits(network, test.pixels).label == test.labels  # [E + 1, M]
    label, exit_index = early_exit_answers(network, test.pixels)
    right = label == test.labels
    thresholds: list[float | None] = [*calibration.thresholds, None]
    exits = []
    for index, (name, threshold) in enumerate(zip([*network.taps, "classifier"], thresholds, strict=True)):
        left = exit_index == index
        exits.append(
            ExitReport(
                name=name,
                threshold=threshold,
                images=int(left.sum()),
                share=left.double().mean().item(),
                accuracy=right[left].double().mean().item() if left.any() else None,
                accuracy_on_all=of_all[index].double().mean().item(),
            )
        )
    accuracy, full_accuracy = right.double().mean().item(), of_all[-1].double().mean().item()
    return {
        "exits": exits,
        "accuracy": accuracy,
        "full_accuracy": full_accuracy,
        "accuracy_drop_points": 100.0 * (full_accuracy - accuracy),
        "left_before_last_block": (exit_index < len(BLOCKS) - 1).double().mean().item(),
        "mean_blocks": (exit_index + 1).clamp(max=len(BLOCKS)).double().mean().item(),
    }


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
