"""Work of ``auxhead calibrate``: loads a checkpoint and images, calibrates, and saves the result."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..answers.exit_result import ExitResult
from ..basics.bad_input import BadInput
from ..basics.images import normalise
from ..calibration.calibrate_network import calibrated
from ..calibration.exit_latency import ExitLatencies, measure_exit_latencies
from ..calibration.report import CalibrationReport
from ..calibration.search import one_budget
from ..make_runner import make_runner
from ..network.learned_from import FILE, Samples, identities, learned_by, short
from ..processes.dealing import agree, checkpoint_facts, made_by_rank_0
from ..saving.checkpoint import Checkpoint, save_checkpoint
from ..saving.checkpoint_files import read_description
from ..training.data_sets import Decoded, LabelledImages, decode, load_folder, load_source

#: Images in a batch while all exits answer.
_BATCH = 256


class Request(NamedTuple):
    """The options of ``auxhead calibrate``, by their names."""

    checkpoint: Path
    data: Path | None
    dataset: str | None
    root: Path | None
    backbone: str | None
    modules: str | None
    train_data: Path | None
    skip_damaged: bool
    max_accuracy_drop: float | None
    max_latency_ms: float | None
    max_work: float | None
    confidence: float
    batch: int | None
    seed: int
    device: torch.device


class CalibrationRun(NamedTuple):
    """A checkpoint whose network has its new rules, and the report."""

    loaded: Checkpoint
    report: CalibrationReport


def run_calibration(request: Request, load: Callable[[Path, str | None, str | None], Checkpoint]) -> CalibrationRun:
    """Calibrate the network of a checkpoint on images that it has not learned from; several processes do it together.

    Raises:
        BadInput: no such checkpoint or images, or images that do not fit it.
        ValueError: other options that cannot be used, as :func:`calibrate_network` says.
    """
    agree(lambda: checkpoint_facts(request.checkpoint))
    loaded = load(request.checkpoint, request.backbone, request.modules)
    if loaded.image_size is None:
        raise BadInput("--checkpoint: was saved without image_size, wants one to turn image files into input")
    source = load_source(request.data, request.dataset, request.root)
    agree(lambda: {"images": source.facts()})
    network = loaded.network.to(request.device)
    if request.train_data is not None and request.train_data != Path("none"):
        learned = _decoded(load_folder(request.train_data, "--train-data"), loaded, request)
        inputs = (one for x, _ in _batches(learned, loaded) for one in identities(x))
        samples = Samples([*learned.contents, short(inputs)], frozenset([FILE]))
        network.learned_from = learned_by(network).plus("weights", samples)
    images = _decoded(source, loaded, request)
    latencies = _latencies(request, loaded, images.pixels)
    budgets = request.max_accuracy_drop, request.max_latency_ms, request.max_work
    report = calibrated(
        network, _batches(images, loaded),
        one_budget(0.01 if budgets == (None, None, None) else request.max_accuracy_drop, *budgets[1:], latencies),
        latencies=latencies, confidence=request.confidence, seed=request.seed, files=images.contents,
        train=None if request.train_data is None else set(),  # nothing besides what was noted
    )  # fmt: skip
    names = loaded.classes or source.classes  # without names the network may have more classes than the images
    named = [replace(row, name=name) for row, name in zip(report.classes, names, strict=False)]
    named += report.classes[len(names) :]
    return CalibrationRun(loaded, replace(report, data=source.name, classes=named))


def save_calibrated(directory: Path, checkpoint: Path, run: CalibrationRun) -> None:
    """Write the checkpoint again, with its new rules and the report."""
    loaded, report = run
    description = read_description(checkpoint)
    save_checkpoint(
        directory, loaded.network, backbone=description["backbone"], with_backbone=description["with_backbone"],
        classes=loaded.classes, image_size=loaded.image_size, mean=loaded.mean, std=loaded.std,
        accuracy={"test": report.accuracy, "test_full_network": report.full_accuracy}, calibration=report.to_json(),
    )  # fmt: skip


def _decoded(source: LabelledImages, loaded: Checkpoint, request: Request) -> Decoded:
    """Return images that have the network's classes."""
    if loaded.classes and source.classes != loaded.classes:
        raise BadInput(
            f"--checkpoint: its network has the classes {', '.join(loaded.classes):.100}, got images of "
            f"{', '.join(source.classes):.100}; wants the same, in the same order, by --data or --dataset"
        )
    assert loaded.image_size is not None
    return decode(source, loaded.image_size, skip_damaged=request.skip_damaged)


def _batches(images: Decoded, loaded: Checkpoint) -> Iterator[tuple[Tensor, Tensor]]:
    dtype = loaded.network.dtype
    for chunk, own in zip(images.pixels.split(_BATCH), images.source.labels.split(_BATCH), strict=True):
        yield normalise(chunk, loaded.mean, loaded.std).to(dtype), own


def _latencies(request: Request, loaded: Checkpoint, pixels: Tensor) -> ExitLatencies | None:
    """Measure the runner that a user would take, if a batch size is given; of several processes rank 0 does."""
    if request.batch is None:
        if request.max_latency_ms is not None:
            raise BadInput("--max-latency-ms: wants --batch, the images of a request")
        return None
    some = pixels[torch.arange(request.batch) % len(pixels)]
    measured = made_by_rank_0(lambda: asdict(_measured(loaded, some, request.device)))
    return ExitLatencies(**{**measured, "milliseconds": tuple(measured["milliseconds"])})


def _measured(loaded: Checkpoint, pixels: Tensor, device: torch.device) -> ExitLatencies:
    network = loaded.network
    x = normalise(pixels, loaded.mean, loaded.std).to(device, network.dtype)
    if not x.is_cuda:
        stopping: Callable[[Tensor], ExitResult] = functools.partial(network, stop=True)
        return replace(measure_exit_latencies(network, stopping, x), runner="eager, stop=True")
    with make_runner(network, x) as runner:
        return measure_exit_latencies(network, runner, x)
