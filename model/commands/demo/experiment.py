"""The demo's experiment: train the network, choose thresholds, let a held-out test split leave early."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....kernels.reference.criteria import CRITERIA
from ...basics.files import replacing
from ...basics.images import MEAN, STD
from ...calibration.samples import collect_logits
from ...calibration.thresholds import exit_indices, exit_scores, thresholds_at_error_rate
from ...network.early_exit_network import EarlyExitNetwork
from ...network.learned_from import LearnedFrom, fingerprint
from ...saving.checkpoint import save_checkpoint
from ...training.batches import PixelBatches
from ...training.data_sets import LabelledImages, Split, Splits, read_splits
from ...training.plan import TrainingPlan, epochs_for
from ...training.train import train
from ..small_resnet import BACKBONE, BLOCKS, small_early_exit_network
from ..train_run import show_steps
from .report import REPORT_FORMAT, DemoReport, ExitReport, demo_environment

#: Error rates that the search tries, each for all heads alike.
_ERROR_RATES = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32)

#: The choice is this many rates stricter than the best one.
_STEPS_BACK = 2

#: Folds of the cross-validation.
_FOLDS = 5


class ChosenThresholds(NamedTuple):
    """Thresholds for E heads, and the accuracies on the samples that they were chosen on, 0 to 1."""

    thresholds: tuple[float, ...]
    """One for each head, a float32 value; 1.0 never exits."""
    accuracy: float
    """Of early exit."""
    full_accuracy: float
    """Of the classifier alone."""


def choose_thresholds(confidence: Tensor, correct: Tensor, max_accuracy_drop: float) -> ChosenThresholds:
    """Choose a ``max_prob`` threshold for each head; nothing is proven about other samples.

    A bound as that of ``calibrate_network`` takes more samples than the demo has.

    For an error rate, each head takes the smallest threshold that keeps it (:func:`thresholds_at_error_rate`). All
    samples count, not only those that earlier heads leave for it: these are few. A head that cannot gets 1.0.

    Of several rates, the one is taken under which samples leave earliest (by the mean of their exit indices) while
    accuracy drops by at most ``max_accuracy_drop``: on the split itself, which always holds for the result, and in
    five-fold cross-validation. The best of several still fits accidents of a small split: if it loses samples in
    cross-validation, the result is two rates stricter (one, if no head would exit otherwise), in the spirit of the
    one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984). If no rate will do, no head
    exits.

    Args:
        confidence: [E, M] float32, of each head, 0 to 1; NaN never exits.
        correct: [E + 1, M] bool, true where a head or, last, the classifier is right; both on the CPU.
        max_accuracy_drop: 0.005 is half a percentage point.
    """
    confidence = confidence.nan_to_num(nan=0.0).clamp(max=1.0)
    heads, samples = confidence.shape
    needed = int(correct[-1].sum()) - max_accuracy_drop * samples - 1e-6  # samples that must be answered right
    best = torch.ones(heads)
    earliest = nobody_leaves = float(heads)
    stricter: list[Tensor] = []  # candidates that hold and let some samples leave, the strictest first
    for rate in _ERROR_RATES:
        candidate = _at_error_rate(confidence, correct, rate)
        exits = exit_indices(confidence, candidate)
        mean_exit = exits.double().mean().item()
        if _right(correct, exits) < needed or mean_exit == nobody_leaves:
            continue
        stricter.append(candidate)
        held_out = _lost_held_out(confidence, correct, rate)
        if mean_exit < earliest and held_out <= max_accuracy_drop * samples + 1e-6:
            earliest = mean_exit
            best = stricter[-1 - _STEPS_BACK :][0] if held_out else candidate
    accuracy = _right(correct, exit_indices(confidence, best)) / samples
    return ChosenThresholds(tuple(best.tolist()), accuracy, int(correct[-1].sum()) / samples)


def _at_error_rate(confidence: Tensor, correct: Tensor, rate: float) -> Tensor:
    return thresholds_at_error_rate(confidence, correct, rate, [CRITERIA["max_prob"].range] * len(confidence))


def _right(correct: Tensor, exits: Tensor) -> int:
    return int(correct.gather(0, exits[None]).sum())


def _lost_held_out(confidence: Tensor, correct: Tensor, error_rate: float) -> int:
    """Count, in cross-validation, the samples that the classifier gets right and early exit gets wrong.

    Samples that only a head gets right do not make up for them: on another split they may not be there.
    """
    fold = torch.arange(confidence.shape[1]) % _FOLDS
    lost = 0
    for held_out in range(_FOLDS):
        own = fold == held_out
        exits = exit_indices(confidence[:, own], _at_error_rate(confidence[:, ~own], correct[:, ~own], error_rate))
        lost += int((correct[-1, own] & ~correct[:, own].gather(0, exits[None])[0]).sum())
    return lost


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
        advance_reading = start_phase("reading images", len(source.open))
        source, splits = read_splits(
            source, image_size, seed, skip_damaged=skip_damaged, tell=tell, on_image=lambda: advance_reading(1, "")
        )

    with _timed(seconds, "train"):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = small_early_exit_network(len(source.classes)).to(device)
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # trains a tenth faster
        network.learned_from = LearnedFrom(None, fingerprint(network))  # nothing yet
        epochs = _train(network, splits.train, image_size, epochs, seed, start_phase)

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
            epochs=epochs,
            images={name: len(split.labels) for name, split in zip(Splits._fields, splits, strict=True)},
            blocks=len(BLOCKS),
            max_accuracy_drop=max_accuracy_drop,
            validation={"accuracy": calibration.accuracy, "full_accuracy": calibration.full_accuracy},
            latency=None,
            environment=demo_environment(device),
            seconds=seconds,
            **report,
        ),
    )


def _train(
    network: EarlyExitNetwork, split: Split, image_size: int, epochs: int | None, seed: int, start_phase: StartPhase
) -> int:
    """Train the network, with progress counted in images; returns the number of epochs."""
    batch_size = min(32, len(split.labels))
    plan = TrainingPlan(epochs=epochs or epochs_for(len(split.labels), batch_size))
    device = next(network.parameters()).device
    batches = PixelBatches(split, batch_size, device=device, seed=seed, largest_shift=image_size // 16)
    images = len(batches) * batch_size
    advance = start_phase("training, all epochs", images * plan.epochs)
    train(network, batches, plan, seed=seed, on_step=show_steps(advance, plan.epochs, images))
    return plan.epochs


def calibrate_demo(network: EarlyExitNetwork, validation: Split, max_accuracy_drop: float) -> ChosenThresholds:
    """Choose the thresholds on a validation split and set the network's rules to them."""
    found = collect_logits(network, _batches(network, validation))
    heads = len(network.taps)
    scores = exit_scores(found.logits[:-1], ["max_prob"] * heads, [1.0] * heads)
    calibration = choose_thresholds(scores, found.logits.argmax(2) == found.labels, max_accuracy_drop)
    network.set_rules(dict(zip(network.taps, calibration.thresholds, strict=True)))
    if network.learned_from is not None:
        network.learned_from = network.learned_from.plus("thresholds", validation.samples())
    return calibration


def _evaluate(network: EarlyExitNetwork, test: Split, calibration: ChosenThresholds) -> dict[str, Any]:
    """Return the fields of :class:`DemoReport` that are about the test split."""
    of_all = collect_logits(network, _batches(network, test)).logits.argmax(2) == test.labels  # [E + 1, M]
    label, exit_index = early_exit_answers(network, test)
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


@torch.no_grad()
def early_exit_answers(network: EarlyExitNetwork, images: Split) -> tuple[Tensor, Tensor]:
    """Run the network with early exit; returns label and exit index, each [M] int64 on the CPU."""
    results = [network(x) for x, _ in _batches(network, images)]
    return torch.cat([r.label for r in results]).cpu(), torch.cat([r.exit_index for r in results]).cpu()


def _batches(network: EarlyExitNetwork, images: Split) -> PixelBatches:
    return PixelBatches(images, min(256, len(images.labels)), device=network.device)


def save_demo(directory: Path, run: DemoRun) -> list[Path]:
    """Write the checkpoint, and if the source has no files, a test image for each of up to ten classes.

    Returns:
        Image files of the test split, one a class, to try ``auxhead infer`` on.
    """
    report, source = run.report, run.source
    accuracy = {"test": report.accuracy, "test_full_network": report.full_accuracy}
    save_checkpoint(
        directory, run.network, backbone=BACKBONE, classes=source.classes, image_size=report.image_size,
        mean=MEAN, std=STD, accuracy=accuracy,
    )  # fmt: skip
    examples = []
    test = run.splits.test
    for label in range(min(10, len(source.classes))):
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
        path = folder / f"{source.classes[label]}.png"
        with replacing(path) as unfinished:
            source.open[of_class[0]]().save(unfinished)
        examples.append(path)
    return examples
