"""Work of ``auxhead calibrate``: loads a checkpoint and images, calibrates, and saves the result."""

import functools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..answers.exit_result import ExitResult
from ..basics.bad_input import BadInput
from ..basics.files import write_json
from ..calibration.calibrate_network import calibrate_prepared, prepare
from ..calibration.curve import curve_of_prepared
from ..calibration.exit_latency import ExitLatencies, measure_exit_latencies
from ..calibration.report import LEGEND, CalibrationReport, most_telling
from ..calibration.search import one_budget
from ..make_runner import make_runner
from ..network.learned_from import FILE, Samples, identities, learned_by, short
from ..processes.dealing import agree, checkpoint_facts, made_by_rank_0
from ..processes.process_group import own_rank
from ..saving.checkpoint import Checkpoint, save_checkpoint
from ..saving.checkpoint_files import read_description
from ..training.batches import PixelBatches
from ..training.data_sets import decode, describe_damaged
from ..training.sources import LabelledImages, load_source
from .errors import by_option
from .options import make_output_directory
from .user_model import load_network

#: Images in a batch while all exits answer.
_BATCH = 256


def run_calibration(
    console: Console, asked: SimpleNamespace, device: torch.device, draw: Callable[[str, dict[str, Any]], object]
) -> None:
    """Calibrate the network of a checkpoint on images that it has not learned from; several processes do it together.

    ``asked`` has the options of ``auxhead calibrate`` by their names; ``draw`` saves a figure, given its name and the
    content of its report. ``BadInput`` or ``ValueError`` for options, a checkpoint or images that cannot be used.
    """
    agree(lambda: checkpoint_facts(asked.checkpoint))
    loaded = load_network("auxhead calibrate", asked.checkpoint, asked.backbone, asked.modules)
    source = load_source(asked.data)
    agree(lambda: {"images": source.facts()})
    network = loaded.network.to(device)
    if asked.train_data is not None and asked.train_data != Path("none"):
        learned = _read(console, load_source(asked.train_data, "--train-data"), loaded, asked)
        assert learned.split.contents is not None
        inputs = (one for x, _ in learned for one in identities(x))
        samples = Samples([*learned.split.contents, short(inputs)], frozenset([FILE]))
        network.learned_from = learned_by(network).plus("weights", samples)
    images = _read(console, source, loaded, asked)
    latencies = _latencies(asked, loaded, images.split.pixels, device)
    no_budget = (asked.max_accuracy_drop, asked.max_latency_ms, asked.max_work) == (None, None, None)
    train: set[bytes] | None = None if asked.train_data is None else set()  # nothing besides what was noted
    with by_option("data", "confidence", "max_accuracy_drop", "max_latency_ms", "max_work"):
        drop = 0.01 if no_budget else asked.max_accuracy_drop
        budget = one_budget(drop, asked.max_latency_ms, asked.max_work, latencies)
        prepared = prepare(
            network, images, {"budget": budget}, latencies, asked.confidence, asked.seed, splits=None, train=train
        )
        report = calibrate_prepared(network, prepared, budget)
    curve = curve_of_prepared(network, prepared) if asked.curve else None
    names = loaded.classes or source.classes  # without names the network may have more classes than the images
    named = [replace(row, name=name) for row, name in zip(report.classes, names, strict=False)]
    report = replace(report, data=source.name, classes=[*named, *report.classes[len(names) :]])
    if own_rank() > 0:
        return  # rank 0 has the same report
    make_output_directory(asked.out)
    description, content = read_description(asked.checkpoint), report.to_json()
    save_checkpoint(
        asked.out, network, backbone=description["backbone"], with_backbone=description["with_backbone"],
        classes=loaded.classes,
        accuracy={"test": report.accuracy, "test_full_network": report.full_accuracy}, calibration=content,
    )  # fmt: skip
    write_json(asked.out / "report.json", content)
    draw("calibration", content)
    print_report(console, report)
    files = "model.json and its parameters, report.json, calibration.png, .svg, .json"
    if curve is not None:
        content = replace(curve, data=source.name).to_json()
        write_json(asked.out / "anytime-report.json", content)
        draw("anytime", content)
        console.print(str(curve), soft_wrap=True)
        files += ", anytime-report.json, anytime.png, .svg, .json"
    console.print(f"\nSaved in {asked.out}: {files}", soft_wrap=True)


def _read(console: Console, source: LabelledImages, loaded: Checkpoint, asked: SimpleNamespace) -> PixelBatches:
    """Return images that have the network's classes, in batches as it takes them."""
    if loaded.classes and source.classes != loaded.classes:
        raise BadInput(
            f"checkpoint: its network has the classes {', '.join(loaded.classes):.100}, got images of "
            f"{', '.join(source.classes):.100}; wants the same, in the same order, by --data"
        )
    _, images, damaged = decode(source, loaded.preprocessing, skip_damaged=asked.skip_damaged)
    if damaged:
        console.print(describe_damaged(damaged, len(source.open)), soft_wrap=True)
    batch_size, dtype = min(_BATCH, len(images.labels)), loaded.network.dtype
    return PixelBatches(images, batch_size, device=torch.device("cpu"), dtype=dtype)


def _latencies(
    asked: SimpleNamespace, loaded: Checkpoint, pixels: Tensor, device: torch.device
) -> ExitLatencies | None:
    """Measure the runner that a user would take, if a batch size is given; of several processes rank 0 does."""
    if asked.batch is None:
        if asked.max_latency_ms is not None:
            raise BadInput("--max-latency-ms: wants --batch, the images of a request")
        return None
    network = loaded.network
    some = pixels[torch.arange(asked.batch) % len(pixels)]
    x = loaded.preprocessing.normalised(some).to(device, network.dtype)

    def measured() -> ExitLatencies:
        if not x.is_cuda:
            stopping: Callable[[Tensor], ExitResult] = functools.partial(network, stop=True)
            return replace(measure_exit_latencies(network, stopping, x), runner="eager, stop=True")
        with make_runner(network, x) as runner:
            return measure_exit_latencies(network, runner, x)

    found = made_by_rank_0(lambda: asdict(measured()))
    return ExitLatencies(**{**found, "milliseconds": tuple(found["milliseconds"])})


#: Of more classes than this the table has the most telling alone: half as many that are right least often, and half
#: that leave latest.
_MOST_CLASSES = 20


def print_report(console: Console, report: CalibrationReport) -> None:
    """Print a calibration for someone who has not read how it is made."""
    if report.chance is not None:
        console.print(report.chance, soft_wrap=True)
    parts = ", ".join(f"{count:,} for {name}" for name, count in report.samples.items())
    left_out = f"{report.left_out:,} left out, which it has learned from; " if report.left_out else ""
    console.print(f"{report.left_out + sum(report.samples.values()):,} images: {left_out}{parts}", soft_wrap=True)
    known = " that nothing was chosen with" if report.bound.unknown is None else ""
    table = Table(title=f"Test split: {report.samples['test']:,} images{known}")
    (first, *columns), *rows = report.rows()
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(_by_class(report))
    console.print("\n".join([LEGEND, *report.sentences()]), soft_wrap=True)


def _by_class(report: CalibrationReport) -> Table:
    rows, each = report.classes, _MOST_CLASSES // 2
    title = "Test split by class"
    if len(rows) > _MOST_CLASSES:
        title += f": of {len(rows):,} the {each} that are right least often, and the {each} that leave latest"
        rows = most_telling(rows, each)
    table = Table(title=title)
    table.add_column("class", overflow="fold")
    exits = len(report.exits)
    for column in ("images", "right", "full net-\nwork right", f"leave at exit\n0 to {exits - 1}, %"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = ["-" if value is None else f"{value:.1%}" for value in (row.accuracy, row.full_accuracy)]
        left = "-" if row.shares is None else " ".join(f"{100 * share:3.0f}" for share in row.shares)
        table.add_row(row.name, f"{row.samples:,}", *cells, left)
    return table
